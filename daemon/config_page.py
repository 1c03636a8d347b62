"""docs/configuration.md, made from the declarations: `python -m mqmk.daemon.config_page > docs/configuration.md`."""

from dataclasses import fields
from typing import Final, get_type_hints

from mqmk.daemon.config import Config
from mqmk.daemon.config_keys import Key, all_keys, descriptions, written

TABLE: Final = ("| setting | default | accepts | what for |", "|---|---|---|---|")
HEAD: Final = """\
# Configuration

<!-- Made by `python -m mqmk.daemon.config_page > docs/configuration.md`; a test compares. -->

The daemon works with no configuration at all. What you choose comes from four places; a later one wins:

1. the defaults below
2. one YAML file: `--config FILE`, or `$MQMK_CONFIG`, or `mqmk.yaml` in the current folder if there is one
3. environment variables: `MQMK_` and the setting's name in capitals, with an underscore for each dot, so that
   `bucket.url` is `MQMK_BUCKET_URL`; an empty variable counts as absent
4. flags: `--set bucket.url=s3://pictures`; `--state FOLDER` is short for `--set state.dir=FOLDER`

```yaml
bucket:
  url: s3://pictures
train:
  epochs: 10
  augmentation: {mirror: false}
evaluate:
  matchers: [mqmk, cascade]
```

`mqmk-daemon config` prints every value and where it came from (passwords in URLs hidden), `mqmk-daemon doctor` says
whether it all works here. A name that does not exist, or a value that is not accepted, stops the command with the place
(file and line, variable, or command line), the nearest name that exists and what is accepted.

The same text means the same in all places: `none` (or `null`) is no value where that is accepted, `true`/`yes`/`on` and
`false`/`no`/`off` are truth values, durations are seconds. A relative path in a file starts from the file's folder,
elsewhere from the current one; `~` is your home.
"""


def page() -> str:
    """The whole page."""
    sections = [_section(entry.name) for entry in fields(Config)]
    return "\n".join([HEAD, *sections])


def _section(name: str) -> str:
    keys = [key for key in all_keys().values() if key.name.startswith(f"{name}.")]
    about = get_type_hints(Config)[name].__doc__
    rows = [f"| `{key.name}` | {_default(key)} | {key.accepted} | {descriptions()[key.name]} |" for key in keys]
    return "\n".join([f"## {name}", "", about, "", *TABLE, *rows, ""])


def _default(key: Key) -> str:
    return "`~/.local/state/mqmk`" if key.name == "state.dir" else f"`{written(key.default)}`"


if __name__ == "__main__":
    print(page(), end="")
