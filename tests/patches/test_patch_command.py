"""``mlp-offload patch`` on the trees of the supported releases: what it changes, what it refuses, what it leaves alone."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_trees import RELEASES, unpack

from mlp_offload.cli.main import main
from mlp_offload.cli.patch import PATCHES, load, releases

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import make_patches  # noqa: E402

CORE = {"megatron/core/optimizer/__init__.py", "megatron/core/optimizer/optimizer_config.py"}
TRAINING = {"megatron/training/arguments.py", "megatron/training/global_vars.py"}
CORE_ONLY = ("0.16.1",)  # whose wheels have no megatron/training


@pytest.fixture(params=RELEASES)
def release(request):
    return request.param


@pytest.fixture
def tree(release, tmp_path):
    return unpack(release, tmp_path / "tree")


def files_of(release):
    return CORE if release in CORE_ONLY else CORE | TRAINING


def contents(tree):
    """Everything that is there: modes and hashes of all files, and directories."""
    return {
        str(path.relative_to(tree)): (
            path.stat().st_mode,
            path.is_file() and hashlib.sha256(path.read_bytes()).digest(),
        )
        for path in tree.rglob("*")
    }


def changed(before, after):
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def call(capsys, action, tree, status=0):
    """What the command tells as JSON; no traceback, and the exit status that was expected."""
    assert main(["patch", action, str(tree), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_there_is_a_patch_for_every_release_and_they_can_be_told_apart():
    assert releases() == list(RELEASES)
    ids = [tuple(sorted((p.before, p.after) for p in load(release) if p.part == "core")) for release in RELEASES]
    assert len(set(ids)) == len(RELEASES)


def test_check_apply_twice_and_revert(release, tree, capsys):
    before = contents(tree)
    told = call(capsys, "check", tree)
    assert (told["release"], told["status"]) == (release, "not applied")
    assert set(told["would_change"]) == files_of(release)
    assert told["parts"] == (["core"] if release in CORE_ONLY else ["core", "training"])
    assert contents(tree) == before

    script = tree / "megatron/core/optimizer/__init__.py"
    script.chmod(0o750)
    before = contents(tree)
    told = call(capsys, "apply", tree)
    assert told["status"] == "applied" and set(told["changed"]) == files_of(release)
    applied = contents(tree)
    assert changed(before, applied) == files_of(release)
    assert all(applied[name][0] == before[name][0] for name in before), "modes are kept"
    for name in files_of(release):
        compile((tree / name).read_bytes(), name, "exec")

    assert call(capsys, "apply", tree)["changed"] == []
    told = call(capsys, "check", tree)
    assert (told["status"], told["would_change"]) == ("applied", [])
    assert contents(tree) == applied

    assert set(call(capsys, "revert", tree)["changed"]) == files_of(release)
    assert contents(tree) == before
    assert call(capsys, "revert", tree)["changed"] == []


def test_git_and_patch_make_the_same_of_it(release, tree, tmp_path, capsys):
    before = contents(tree)
    patches = [PATCHES / release / f"{part}.patch" for part in ("core", "training")[: 1 if release in CORE_ONLY else 2]]
    call(capsys, "apply", tree)
    applied = contents(tree)
    call(capsys, "revert", tree)
    for apply in (["git", "apply"], ["patch", "--no-backup-if-mismatch", "-s", "-f", "-p1"]):
        if shutil.which(apply[0]) is None:
            continue
        for options, wanted in (([], applied), (["-R"], before)):
            for patch in patches:
                with open(patch) as text:
                    subprocess.run([*apply, *options], stdin=text, cwd=tree, check=True)
            assert {n: c for n, (_, c) in contents(tree).items()} == {n: c for n, (_, c) in wanted.items()}, apply


def test_a_partly_applied_tree_is_completed_or_reverted(release, tree, capsys):
    before = contents(tree)
    call(capsys, "apply", tree)
    applied = contents(tree)
    for action, wanted in (("apply", applied), ("revert", before)):
        call(capsys, "apply", tree)
        original = unpack(release, tree.parent / f"original-{action}")
        shutil.copy(original / "megatron/core/optimizer/__init__.py", tree / "megatron/core/optimizer/__init__.py")
        told = call(capsys, "check", tree)
        assert (told["status"], told["would_change"]) == ("partly applied", ["megatron/core/optimizer/__init__.py"])
        call(capsys, action, tree)
        assert contents(tree) == wanted


@pytest.mark.parametrize("patched", [False, True])
def test_an_edited_file_is_refused_by_name_and_everything_left_as_it_is(release, tree, capsys, patched):
    if patched:
        call(capsys, "apply", tree)
    name = sorted(files_of(release))[-1]
    with open(tree / name, "a") as file:
        file.write("# mine\n")
    before = contents(tree)
    for action in ("check", "apply", "revert"):
        error = call(capsys, action, tree, status=1)["error"]
        assert f"is Megatron-Core {release} but for {name}: edited" in error and "git apply --3way" in error
        for patch in re.findall(r"\S+\.patch", error):
            assert Path(patch).is_file()
    assert contents(tree) == before


def test_the_merge_that_a_refusal_proposes_keeps_the_edits(release, tree, capsys):
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@localhost"]
    name = "megatron/core/optimizer/__init__.py"
    for step in ("release", "mine"):
        if step == "mine":
            (tree / name).write_text("# mine\n" + (tree / name).read_text())
        for command in (["init", "-q"], ["add", *sorted(files_of(release))], ["commit", "-q", "-m", step]):
            subprocess.run([*git, *command], cwd=tree, check=True)
    error = call(capsys, "apply", tree, status=1)["error"]
    proposed = re.search(r"`git (apply --3way [^`]*)`", error)[1].split()
    subprocess.run([*git, *proposed], cwd=tree, check=True, capture_output=True)
    merged = (tree / name).read_text()
    assert merged.startswith("# mine\n") and "build_from_optimizer_config" in merged


def test_what_is_no_release_is_refused_with_the_next_step(tmp_path, capsys):
    tree = unpack("0.19.2", tmp_path / "tree")
    error = call(capsys, "apply", tree / "megatron" / "core", status=1)["error"]
    assert "holds no megatron/core" in error and error.endswith(f"give {tree}")
    assert "give a checkout of Megatron-LM" in call(capsys, "apply", tmp_path / "nothing", status=1)["error"]
    (tree / "megatron/training/global_vars.py").unlink()
    assert "but for megatron/training/global_vars.py (missing)" in call(capsys, "apply", tree, status=1)["error"]
    for name in CORE | TRAINING:
        (tree / name).write_text("pass\n")
    error = call(capsys, "apply", tree, status=1)["error"]
    assert "none of the releases that patches are for (0.16.1, 0.17.1, 0.18.2, 0.19.2)" in error


def command(tree, action="apply"):
    return [sys.executable, "-m", "mlp_offload", "patch", action, str(tree)]


def environment():
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}


def test_when_a_file_cannot_be_written_none_is_changed(tmp_path):
    """With at most 64 KiB a file, arguments.py alone is too long."""
    tree = unpack("0.19.2", tmp_path / "tree")
    before = contents(tree)
    script = ["bash", "-c", 'ulimit -f 64 && exec "$@"', "bash", *command(tree)]
    done = subprocess.run(script, capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, contents(tree)) == (1, before)
    assert "File too large" in done.stderr and "Nothing was changed" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("stuck", sorted(CORE | TRAINING))
def test_when_a_file_cannot_be_replaced_the_others_are_put_back(tmp_path, stuck):
    """A file that is itself a mount point can be read, but not be renamed over."""
    tree = unpack("0.19.2", tmp_path / "tree")
    before = contents(tree)
    script = 'mount --bind "$1" "$1" && shift && exec "$@"'
    arguments = ["unshare", "-Urm", "sh", "-c", script, "sh", str(tree / stuck), *command(tree)]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment(), timeout=60)
    if done.returncode and done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert (done.returncode, contents(tree)) == (1, before)
    assert "Device or resource busy" in done.stderr and stuck in done.stderr and "Nothing was changed" in done.stderr


def test_a_hard_link_into_a_package_cache_is_not_written_through(tmp_path, capsys):
    tree = unpack("0.19.2", tmp_path / "tree")
    name = "megatron/core/optimizer/__init__.py"
    os.link(tree / name, tmp_path / "cached")
    before = (tmp_path / "cached").read_bytes()
    call(capsys, "apply", tree)
    assert (tmp_path / "cached").read_bytes() == before != (tree / name).read_bytes()


def test_what_a_person_reads(tmp_path, capsys):
    tree = unpack("0.16.1", tmp_path / "tree")
    for action, last in (
        ("check", f"not applied; it applies cleanly: mlp-offload patch apply {tree}"),
        ("apply", "applied: 2 files changed"),
        ("apply", "already applied: nothing changed"),
        ("check", f"applied; nothing to do. To take it out: mlp-offload patch revert {tree}"),
        ("revert", "reverted: 2 files changed"),
        ("revert", "not applied: nothing changed"),
    ):
        assert main(["patch", action, str(tree)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"Megatron-Core 0.16.1 in {tree}" and lines[-1] == last
        assert lines[-2].startswith("There is no megatron/training: the core part only")
    with pytest.raises(SystemExit) as stop:
        main(["patch", "--help"])
    assert stop.value.code == 0
    assert "mlp-offload patch apply ~/Megatron-LM" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------- generator


def test_the_patches_are_what_the_generator_makes(release, tree):
    made = make_patches.make_patches(tree)
    assert sorted(made) == (["core"] if release in CORE_ONLY else ["core", "training"])
    for part, patch in made.items():
        assert patch == (PATCHES / release / f"{part}.patch").read_bytes(), (
            f"run scripts/make_patches.py {release} TREE"
        )


def test_an_anchor_that_does_not_match_exactly_once_stops_the_generator(tmp_path):
    tree = unpack("0.19.2", tmp_path / "tree")
    file = tree / "megatron/training/arguments.py"
    text = file.read_text()
    line = "    parser = _add_sft_args(parser)\n"
    for edited, count in ((text.replace(line, ""), 0), (text.replace(line, 2 * line), 2)):
        file.write_text(edited)
        with pytest.raises(SystemExit) as stop:
            make_patches.make_patches(tree)
        assert f"arguments.py: must match exactly once, but matches {count} times:\n{line}" in str(stop.value)
