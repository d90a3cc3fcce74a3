import json
import os
import random
from pathlib import Path

import pytest
import xxhash

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.checkpoint.folder import (
    STATE_FILE,
    TRACKER,
    Draft,
    damage,
    discard,
    file_digest,
    find,
    is_megatron_folder,
    iterations,
    shard_digests,
    swap_in,
)
from slime_like.megatron_backend.checkpoint.start_weights import start_source, start_step
from tests.helpers.full_disks import largest_file


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
    assert find(str(tmp_path)).endswith("iter_0000003")


def test_without_tracker_the_newest_whole_folder_counts(tmp_path):
    # A crash between the rename and the tracker's first writing.
    make_checkpoint(tmp_path, 3)
    make_checkpoint(tmp_path, 10)
    (tmp_path / ".iter_0000011.tmp").mkdir()
    assert is_megatron_folder(str(tmp_path))
    assert find(str(tmp_path)).endswith("iter_0000010")


def test_a_draft_is_no_checkpoint(tmp_path):
    (tmp_path / ".iter_0000011.tmp").mkdir()
    assert not is_megatron_folder(str(tmp_path))
    with pytest.raises(CheckpointError, match="no Megatron checkpoint"):
        find(str(tmp_path))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "shard.distcp").write_bytes(b"1"), "is 1 bytes long, but was written with 5"),
        (lambda f: (f / "shard.distcp").unlink(), "shard.distcp is missing"),
        (lambda f: (f / STATE_FILE).unlink(), "no complete checkpoint"),
        (lambda f: (f / STATE_FILE).write_text("{"), "no complete checkpoint"),
        (lambda f: (f / STATE_FILE).write_text("[1]"), "no complete checkpoint"),
        (lambda f: (f / "shard.distcp").write_bytes(b"1234567"), "is 7 bytes long, but was written with 5"),
        (lambda f: (f.parent / TRACKER).write_text("newest"), "'newest'"),
        (lambda f: (f.parent / TRACKER).write_text("release"), "release is no complete checkpoint"),
        (lambda f: (f.parent / TRACKER).write_text("9"), "iter_0000009"),
    ],
)
def test_torn_ones_are_refused_by_name(tmp_path, harm, message):
    folder = make_checkpoint(tmp_path, 3)
    (tmp_path / TRACKER).write_text("3")
    find(str(tmp_path))
    harm(folder)
    with pytest.raises(CheckpointError, match=message):
        find(str(tmp_path))


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


def save_at(root, number, **options):
    draft = Draft(folder=str(root), number=number, record={"num_rollouts_done": number}, **options)
    draft.make()
    (root / draft.path / "shard.distcp").write_bytes(b"12345")
    draft.publish()


def test_only_every_so_manieth_stays_and_the_newest(tmp_path):
    for number in range(2, 13, 2):
        save_at(tmp_path, number, retain_interval=4)
        assert find(str(tmp_path)).endswith(f"{number:07d}")
    assert sorted(iterations(str(tmp_path))) == [4, 8, 12]
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("iter")) == [TRACKER]


def test_a_critic_keeps_one_more_until_the_policy_has_followed(tmp_path):
    for number in (1, 2, 3):
        save_at(tmp_path, number, retain_interval=10, num_spared=1)
    assert sorted(iterations(str(tmp_path))) == [2, 3]


def test_no_more_than_the_limit_stay(tmp_path):
    for number in (1, 2, 3, 4):
        save_at(tmp_path, number)
    save_at(tmp_path, 3, total_limit=2)  # done again: what is newer stays until its number is reached
    assert sorted(iterations(str(tmp_path))) == [2, 3, 4]
    save_at(tmp_path, 4, total_limit=2)
    assert sorted(iterations(str(tmp_path))) == [3, 4]
    (tmp_path / ".iter_0000003.deleted").mkdir()  # of a run that was killed while it deleted
    save_at(tmp_path, 6, retain_interval=4, total_limit=1)
    assert sorted(iterations(str(tmp_path))) == [6]
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("iter")) == [TRACKER]


def test_a_limit_of_a_critic_keeps_one_more(tmp_path):
    for number in (1, 2, 3):
        save_at(tmp_path, number, total_limit=1, num_spared=1)
    assert sorted(iterations(str(tmp_path))) == [2, 3]


def test_going_back_deletes_nothing_newer(tmp_path):
    for number in (1, 2, 3):
        save_at(tmp_path, number)
    save_at(tmp_path, 2, retain_interval=10)
    assert sorted(iterations(str(tmp_path))) == [2, 3]
    assert find(str(tmp_path)).endswith("iter_0000002")


def test_a_checkpoint_is_chosen_by_number(tmp_path):
    for number in (1, 2):
        save_at(tmp_path, number)
    assert find(str(tmp_path), 1).endswith("iter_0000001")
    with pytest.raises(CheckpointError, match=r"has no checkpoint 3 .*There: 1, 2\."):
        find(str(tmp_path), 3)


def test_half_written_newer_ones_are_not_read(tmp_path):
    save_at(tmp_path, 1)
    draft = Draft(folder=str(tmp_path), number=2, record={})
    draft.make()
    (tmp_path / draft.path / "shard.distcp").write_bytes(b"123")
    assert find(str(tmp_path)).endswith("iter_0000001")
    (tmp_path / TRACKER).unlink()  # even where nothing says which one is the newest
    assert find(str(tmp_path)).endswith("iter_0000001")
    draft.make()  # the next attempt starts anew
    assert list((tmp_path / draft.path).iterdir()) == []


def test_steps_are_asked_of_folders_that_have_checkpoints(tmp_path):
    save_at(tmp_path / "saves", 1)
    saves, hf = str(tmp_path / "saves"), str(tmp_path)
    assert start_step(CheckpointConfig(hf_checkpoint=hf, load=saves, ckpt_step=1)) == 1
    assert start_step(CheckpointConfig(hf_checkpoint=hf, ref_load=saves, ref_ckpt_step=1)) == 1
    assert start_step(CheckpointConfig(hf_checkpoint=hf, load=saves, ref_load=saves, ref_ckpt_step=1)) is None
    with pytest.raises(CheckpointError, match="--ckpt-step 1"):
        start_step(CheckpointConfig(hf_checkpoint=hf, load=str(tmp_path / "fresh"), ref_load=saves, ckpt_step=1))
    with pytest.raises(CheckpointError, match="--ref-ckpt-step 1"):
        start_step(CheckpointConfig(hf_checkpoint=hf, ref_load=hf, ref_ckpt_step=1))


def test_flags_that_would_do_nothing_are_refused():
    for flags in ({"async_save": True}, {"save_retain_interval": 2}, {"ckpt_step": 0}, {"ref_ckpt_step": 0}):
        (name,) = flags
        assert any(
            f"--{name.replace('_', '-')} does nothing without" in problem
            for problem in CheckpointConfig(**flags).problems()
        )
    assert any(
        "multiple of --save-interval 2" in p
        for p in CheckpointConfig(save="s", save_interval=2, save_retain_interval=3).problems()
    )
    assert CheckpointConfig(save="s", save_interval=2, save_retain_interval=4, async_save=True).problems() == []


def published(root, number=7, **record):
    draft = Draft(folder=str(root), number=number, record={"num_rollouts_done": number, **record})
    draft.make()
    for name, content in (("__0_0.distcp", b"a" * 5000), ("__1_0.distcp", b"b" * 5000), ("common.pt", b"c" * 40)):
        (Path(draft.path) / name).write_bytes(content)
    draft.publish(shard_digests(draft.path, 1))
    return Path(draft.final_path)


def test_one_flipped_bit_is_seen_by_name(tmp_path):
    path = published(tmp_path)
    assert damage(str(path)) == []
    generator = random.Random(0)
    for name in ("__0_0.distcp", "__1_0.distcp", "common.pt"):
        whole = (path / name).read_bytes()
        for _ in range(20):
            place = generator.randrange(8 * len(whole))
            changed = bytearray(whole)
            changed[place // 8] ^= 1 << place % 8
            (path / name).write_bytes(changed)
            assert damage(str(path)) == [name]
            assert sum((damage(str(path), rank=rank, num_ranks=2) for rank in range(2)), []) == [name]
        (path / name).write_bytes(whole)
    assert damage(str(path)) == []


def test_a_digest_is_that_of_the_bytes(tmp_path):
    path = tmp_path / "file"
    for content in (b"", b"1", bytes(20_000_000)):
        path.write_bytes(content)
        assert file_digest(str(path)) == xxhash.xxh3_128_hexdigest(content)


def test_the_record_itself_is_covered(tmp_path):
    path = published(tmp_path, layout=[1, 1, 2]) / STATE_FILE
    path.write_text(path.read_text().replace('"num_rollouts_done": 7', '"num_rollouts_done": 6'))
    with pytest.raises(CheckpointError, match="no complete checkpoint: .*its own digest is another"):
        find(str(tmp_path))


def test_a_checkpoint_from_before_digests_is_taken(tmp_path):
    make_checkpoint(tmp_path, 3)
    assert damage(find(str(tmp_path))) == []


@pytest.mark.parametrize(
    "record",
    [
        {"files": {"../../secret": 5}},
        {"files": {"shard.distcp": "5"}},
        {"files": {"shard.distcp": 5}, "digests": {"other": "x"}},
        {"files": {"shard.distcp": 5}, "digests": [1]},
        {"files": {"shard.distcp": 5}, "layout": 3},
        {"files": {"shard.distcp": 5}, "num_rollouts_done": "3"},
        {"files": [1]},
    ],
)
def test_a_record_that_nobody_wrote_is_refused(tmp_path, record):
    folder = make_checkpoint(tmp_path, 3)
    (folder / STATE_FILE).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find(str(tmp_path))


def test_what_will_not_fit_is_not_begun(tmp_path):
    save_at(tmp_path, 1)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    shard = tmp_path / "iter_0000001" / "shard.distcp"
    os.truncate(shard, 2 * free)
    state = json.loads((tmp_path / "iter_0000001" / STATE_FILE).read_text())
    del state["digest"]
    state["files"]["shard.distcp"] = 2 * free
    (tmp_path / "iter_0000001" / STATE_FILE).write_text(json.dumps(state))
    draft = Draft(folder=str(tmp_path), number=2, record={"num_rollouts_done": 2})
    with pytest.raises(OSError, match=f"about {2 * free} bytes, as the newest one did"):
        draft.make()
    draft.discard()
    assert find(str(tmp_path)).endswith("1") and not os.path.exists(draft.path)
    # One of another kind tells nothing about this one's size.
    another = Draft(folder=str(tmp_path), number=2, record={"num_rollouts_done": 2, "has_optimizer": False})
    another.make()
    another.discard()
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", TRACKER]


def test_room_is_kept_for_what_one_rank_writes_last(tmp_path):
    draft = Draft(folder=str(tmp_path), number=1, record={})
    draft.make()
    assert os.listdir(draft.path) == []  # Megatron says that another is being overwritten
    assert 256 * 1024 <= (tmp_path / ".room").stat().st_blocks * 512 <= 512 * 1024
    draft.release_room()
    assert os.listdir(tmp_path) == [os.path.basename(draft.path)]


def test_a_tracker_without_room_leaves_the_one_before(tmp_path):
    """Nothing needs room after the rename: a checkpoint counts, or is none."""
    save_at(tmp_path, 1)
    draft = Draft(folder=str(tmp_path), number=2, record={})
    draft.make()
    (Path(draft.path) / "shard.distcp").write_bytes(b"12345")
    with largest_file(0), pytest.raises(OSError, match="File too large"):
        draft.publish()
    draft.discard()
    assert find(str(tmp_path)).endswith("iter_0000001")
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", TRACKER]


def test_a_discarded_one_makes_the_one_before_the_latest(tmp_path):
    for number in (1, 2):
        save_at(tmp_path, number)
    discard(str(tmp_path), 2)
    assert find(str(tmp_path)).endswith("iter_0000001")
    discard(str(tmp_path), 1)
    assert os.listdir(tmp_path) == []
