"""Which version an answer is from, and whether all of it is. Cheap to import, for the load generator."""


def version_of(answer: dict) -> int:
    """The version that every part of an answer agrees on; AssertionError if two versions are mixed."""
    version = answer["pool_version"]
    texts = [answer["label"], answer["task"], *(text for row in answer["top"] for text in (row["label"], row["task"]))]
    for text in texts:
        assert f"-v{version}" in text, answer
    assert answer["match"]["runner_up"].startswith("kept"), answer
    return version
