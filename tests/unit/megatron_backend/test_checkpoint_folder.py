import json

import pytest

from slime_like.config.training import CheckpointConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.checkpoint import STATE_FILE, TRACKER, is_megatron_folder, latest, swap_in
from slime_like.megatron_backend.start_weights import start_source


def make_checkpoint(root, number, content=b"12345"):
    folder = root / f"iter_{number:07d}"
    folder.mkdir(parents=True)
    (folder / "shard.distcp").write_bytes(content)
    (folder / STATE_FILE).write_text(json.dumps({"num_rollouts_done": number, "files": {"shard.distcp": 5}}))
    return folder


def test_tracker_names_the_latest(tmp_path):
    make_checkpoint(tmp_path, 3)
    make_checkpoint(tmp_path, 10)
    (tmp_path / TRACKER).write_text("3\n")
    assert latest(str(tmp_path)).endswith("iter_0000003")


def test_without_tracker_the_newest_whole_folder_counts(tmp_path):
    # A crash between the rename and the tracker's first writing.
    make_checkpoint(tmp_path, 3)
    make_checkpoint(tmp_path, 10)
    (tmp_path / ".iter_0000011.tmp").mkdir()
    assert is_megatron_folder(str(tmp_path))
    assert latest(str(tmp_path)).endswith("iter_0000010")


def test_a_draft_is_no_checkpoint(tmp_path):
    (tmp_path / ".iter_0000011.tmp").mkdir()
    assert not is_megatron_folder(str(tmp_path))
    with pytest.raises(CheckpointError, match="no Megatron checkpoint"):
        latest(str(tmp_path))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "shard.distcp").write_bytes(b"1"), "is 1 bytes long, but was written with 5"),
        (lambda f: (f / "shard.distcp").unlink(), "shard.distcp is missing"),
        (lambda f: (f / STATE_FILE).unlink(), "no complete checkpoint"),
        (lambda f: (f / STATE_FILE).write_text("{"), "no complete checkpoint"),
        (lambda f: (f.parent / TRACKER).write_text("release"), "'release'"),
        (lambda f: (f.parent / TRACKER).write_text("9"), "iter_0000009"),
    ],
)
def test_torn_ones_are_refused_by_name(tmp_path, harm, message):
    folder = make_checkpoint(tmp_path, 3)
    (tmp_path / TRACKER).write_text("3")
    latest(str(tmp_path))
    harm(folder)
    with pytest.raises(CheckpointError, match=message):
        latest(str(tmp_path))


def test_a_step_done_again_replaces_its_folder(tmp_path):
    make_checkpoint(tmp_path, 3)
    draft = tmp_path / ".iter_0000003.tmp"
    draft.mkdir()
    (draft / "new").write_text("")
    swap_in(str(draft), str(tmp_path / "iter_0000003"))
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000003"]
    assert [p.name for p in (tmp_path / "iter_0000003").iterdir()] == ["new"]


def test_first_weights_by_precedence(tmp_path):
    hf, reference, empty, saves = (tmp_path / name for name in ("hf", "reference", "empty", "saves"))
    for folder in (hf, reference, empty):
        folder.mkdir()
    (hf / "config.json").write_text("{}")
    make_checkpoint(saves, 1)

    def source(**options):
        return start_source(CheckpointConfig(hf_checkpoint="given", **{k: str(v) for k, v in options.items()}))

    assert source(load=saves, ref_load=reference) == str(saves)
    assert source(load=hf, ref_load=reference) == str(hf)
    assert source(load=empty, ref_load=reference) == str(reference)
    assert source(load=tmp_path / "absent") == "given"
