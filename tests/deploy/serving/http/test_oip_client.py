"""A real client of the Open Inference Protocol talks to the API: tritonclient, over a plain uvicorn server."""

import numpy as np
import pytest
from support.servers.http_server import served
from support.serving.fingerprints import image_bytes, marked_pool, publish

from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import decode

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # gevent's and its friends'
triton = pytest.importorskip("tritonclient.http", reason="pip install 'tritonclient[http]'", exc_type=ImportError)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    vit, pools = load_backbone(), tmp_path_factory.mktemp("served") / "pools"
    publish(pools, marked_pool(vit, 1), 1)
    with served(vit, pools) as url:
        yield url.removeprefix("http://")


def tensor(name: str, values: np.ndarray, datatype: str, binary: bool):
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def test_the_client_finds_the_server_and_the_model(address):
    client = triton.InferenceServerClient(address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mqmk")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    assert client.get_model_metadata("mqmk")["inputs"][0]["name"] == "image"


@pytest.mark.parametrize("binary", [True, False], ids=["binary answers", "JSON answers"])
def test_files_and_pixels_give_the_same_answers(address, binary):
    client = triton.InferenceServerClient(address)
    data = [image_bytes(seed) for seed in range(3)]
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("label", "score", "pool_version")]
    as_files = client.infer("mqmk", [tensor("image", np.array(data, dtype=object), "BYTES", True)], outputs=outputs)
    pixels = np.stack([np.asarray(decode(one)) for one in data])
    as_pixels = client.infer("mqmk", [tensor("image", pixels, "UINT8", True)], outputs=outputs)
    in_json = client.infer("mqmk", [tensor("image", pixels, "UINT8", False)], outputs=outputs)
    for found in (as_files, as_pixels, in_json):
        labels = [label.decode() if isinstance(label, bytes) else label for label in found.as_numpy("label")]
        assert all(label.startswith("label-v1-") for label in labels)
        assert found.as_numpy("pool_version").tolist() == [1, 1, 1]
        np.testing.assert_allclose(found.as_numpy("score"), as_files.as_numpy("score"), atol=1e-5)


def test_without_named_outputs_all_of_them_come(address):
    client = triton.InferenceServerClient(address)
    found = client.infer(
        "mqmk", [tensor("image", np.array([image_bytes()], dtype=object), "BYTES", True)], request_id="one"
    )
    assert found.get_response()["id"] == "one"
    assert found.as_numpy("task").tolist() == [b"task-v1"]
    assert found.as_numpy("unknown").tolist() == [False]


def test_an_error_reaches_the_client_as_a_message(address):
    from tritonclient.utils import InferenceServerException

    client = triton.InferenceServerClient(address)
    with pytest.raises(InferenceServerException, match="expected a JPEG, PNG or WebP image"):
        client.infer("mqmk", [tensor("image", np.array([b"hello"], dtype=object), "BYTES", True)])
