# SPDX-License-Identifier: Apache-2.0
"""Loading models: names, progress, giving up, giving back."""

import hashlib
import os
from pathlib import Path

import pytest

from qnnbroker.client import (
    InvalidRequest,
    LoadProgress,
    LoadStage,
    NotFound,
    Session,
)

from .conftest import MakeModel, copier, held


def test_an_error_that_the_broker_answers_is_one_traceback(
    session: Session, tmp_path: Path, make_model: MakeModel
) -> None:
    text = tmp_path / "README.md"
    text.write_text("no model\n" * 100)
    with pytest.raises(InvalidRequest, match="neither a context binary nor") as refused:
        session.load(text)
    with pytest.raises(NotFound) as unknown:
        session.load(make_model(), graphs=["none"])
    for caught in (refused.value, unknown.value):
        assert (caught.__cause__, caught.__suppress_context__) == (None, True)


def test_a_model_tells_what_it_is(session: Session, make_model: MakeModel) -> None:
    path = make_model()
    with session.load(path) as model:
        assert model.name == "adder"
        assert model.content_hash == hashlib.sha256(path.read_bytes()).hexdigest()
        assert model.size_bytes == path.stat().st_size
        assert model.source_path == str(path)
        assert model.graphs["add"] is model.graph
        assert model.graph.model is model
        assert session.models == (model,)
        assert repr(model) == f"<Model 'adder' {model.content_hash[:12]}, 1 graphs>"
    assert not session.models
    assert held(session)["models"] == 0
    assert model.unloaded
    model.unload()


def test_a_name_of_its_own_is_kept(session: Session, make_model: MakeModel) -> None:
    assert session.load(make_model(), name="mine").name == "mine"


def test_a_relative_path_is_one_of_this_process(
    session: Session, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model()
    monkeypatch.chdir(path.parent)
    assert session.load(path.name).source_path == str(path)


def test_the_only_graph_is_not_asked_for_among_several(
    session: Session, make_model: MakeModel
) -> None:
    model = session.load(make_model("two", copier("one"), copier("other")))
    assert list(model.graphs) == ["one", "other"]
    with pytest.raises(InvalidRequest, match="2 graphs, not one; .*'one', 'other'"):
        _ = model.graph


def test_only_the_graphs_that_are_named_are_executable(
    session: Session, make_model: MakeModel
) -> None:
    path = make_model("three", *(copier(name) for name in ("one", "two", "three")))
    with session.load(path) as whole, session.load(path, graphs=["three", "one"]) as part:
        assert set(part.graphs) == {"one", "three"}
        assert part.content_hash == whole.content_hash
        assert not part.shared
        assert held(session)["contexts"] == 2
        with part.graphs["one"].bind() as binding:
            binding.run()
        with session.load(path, graphs=("one", "three")) as same:
            assert same.shared
    with pytest.raises(NotFound, match="no graph 'four'; it has") as refused:
        session.load(path, graphs=["four"])
    assert refused.value.reason == "GRAPH_UNKNOWN"


@pytest.mark.parametrize("graphs", [[], "one"])
def test_graphs_that_are_no_list_of_names_are_refused(
    session: Session, make_model: MakeModel, graphs: list[str] | str
) -> None:
    with pytest.raises(InvalidRequest, match="a list of names of graphs wanted"):
        session.load(make_model(), graphs=graphs)


def test_progress_is_reported_up_to_ready(session: Session, make_model: MakeModel) -> None:
    reports: list[LoadProgress] = []
    model = session.load(make_model(), progress=reports.append)
    assert reports[0].stage is LoadStage.HASHING
    assert reports[-1] == LoadProgress(LoadStage.READY, model.size_bytes, model.size_bytes)


@pytest.mark.parametrize("stage", [LoadStage.HASHING, LoadStage.READY])
def test_a_progress_callback_that_raises_gives_the_load_up(
    session: Session, make_model: MakeModel, stage: LoadStage
) -> None:
    def stop(progress: LoadProgress) -> None:
        if progress.stage is stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.load(make_model(), progress=stop)
    assert session.models == ()
    if stage is LoadStage.READY:  # earlier, it may be ready when the cancel arrives
        assert held(session)["models"] == 0


def test_a_file_that_is_not_there_is_not_found(session: Session, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing") as info:
        session.load(tmp_path / "nothing")
    assert info.value.reason == "FILE_MISSING"
    assert isinstance(info.value, LookupError)


def test_a_path_that_is_not_text_is_refused_here(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="not text") as info:
        session.load(os.fsdecode(b"/tmp/\xff"))
    assert info.value.reason == "BAD_FILE"
