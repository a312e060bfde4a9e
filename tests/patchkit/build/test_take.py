# SPDX-License-Identifier: Apache-2.0
"""make_patch.sh: what it takes from a checkout, what it refuses, and that it builds the same bytes."""

import fcntl
import shutil
from pathlib import Path

import pytest

from patchkit.build import base as bases
from patchkit.build import generated
from patchkit.build.sources import LICENCE_HEAD, PACKAGE, SPDX, Folders, compose
from patchkit.errors import IntegrityError
from patchkit.patch.language import parse
from patchkit.patch.manifest import Base
from tests.patchkit import world
from tests.patchkit.world import ACTOR, BASE, NEW, RESULT, TRAINER

ROOT = Path(__file__).resolve().parents[3]


class Workshop:
    """A clone that has the patch on it, and the sources that the patch was built from."""

    def __init__(self, folder: Path, monkeypatch, capsys) -> None:
        self.clone = world.make_clone(folder / "the clone")
        self.commit = world.git(self.clone, "rev-parse", "HEAD").strip()
        self.patches = world.make_patches(folder, verl=Base("v0.7.0", self.commit))
        self.folders = Folders(folder / "gradloc", folder / "overrides")
        self.base = folder / "pristine"
        self.capsys = capsys
        monkeypatch.setattr(bases, "PINNED", {Base("v0.7.0", self.commit): ""})
        monkeypatch.setattr(bases, "ensure_base", lambda tag: self.base)
        world.run(capsys, self.patches, self.clone)

    def make(self, *options) -> world.Outcome:
        """Runs make_patch.sh's command line in this process."""
        return world.make(self.capsys, self.folders, self.patches, *options)

    def take(self, *options) -> world.Outcome:
        return self.make("--repo", self.clone, *options)

    def edit(self, path: str, text: str) -> None:
        world.write_tree(self.clone, {path: text})

    def seam(self, path: str) -> Path:
        return self.folders.overrides / f"v0.7.0/{path}.patch"

    def refused(self, code: int, said: str, *options) -> str:
        """Asserts that a take is refused and that nothing was written."""
        with world.unchanged(*self.places):
            outcome = self.take(*options).expect(code, said, "next:")
        return outcome.err

    @property
    def places(self) -> tuple[Path, ...]:
        """All that a take may write."""
        return self.folders.package, self.folders.overrides, self.patches

    def result(self) -> dict[str, str]:
        """What the built patch makes of the base."""
        root = world.write_tree(self.clone.parent / "fresh", BASE)
        assert world.run(self.capsys, self.patches, root).code == 0
        files = world.files_of(root)
        shutil.rmtree(root)
        return files


@pytest.fixture
def shop(tmp_path, monkeypatch, capsys):
    return Workshop(tmp_path, monkeypatch, capsys)


def test_a_build_and_a_take_without_edits_write_nothing(shop):
    with world.unchanged(*shop.places):
        shop.make().expect(0, "unchanged")
        shop.take().expect(0, "nothing to take")
        shop.make("--check").expect(0)


@pytest.mark.parametrize("how", ["uncommitted", "staged", "committed", "staged-then-edited"])
def test_edits_are_taken_whether_or_not_they_are_committed(shop, how):
    changed = RESULT[ACTOR].replace("hook()", "hook(self)")
    shop.edit(ACTOR, "staged\n" if how == "staged-then-edited" else changed)
    if how != "uncommitted":
        world.git(shop.clone, "add", "-A")
    if how == "committed":
        world.git(shop.clone, "commit", "-qm", "mine")
    shop.edit(ACTOR, changed)
    shop.take().expect(0, f"taken: {ACTOR}", "built: gradloc.patch")
    assert shop.result() == RESULT | {ACTOR: changed}
    assert shop.make("--check").code == 0


def test_an_untracked_new_module_is_taken_and_a_removed_one_removed(shop):
    shop.edit("verl/gradloc/fresh.py", "fresh = 1\n")
    (shop.clone / NEW).unlink()
    shop.take().expect(0, "taken: verl/gradloc/fresh.py", f"removed: {NEW}")
    wanted = {path: text for path, text in RESULT.items() if path != NEW}
    assert shop.result() == wanted | {"verl/gradloc/fresh.py": "fresh = 1\n"}


def test_edits_of_the_package_go_to_gradloc_and_all_others_to_the_base_s_overrides(shop):
    shop.edit("verl/gradloc/search/fresh.py", "fresh = 1\n")
    shop.edit("verl/utils/reward.py", "reward = 1\n")
    shop.edit("verl/utils/other.py", "touched = True\n")
    assert shop.take().code == 0
    assert (shop.folders.package / "search/fresh.py").read_text() == "fresh = 1\n"
    assert (shop.folders.overrides / "v0.7.0/verl/utils/reward.py").read_text() == "reward = 1\n"
    assert "+touched = True" in (shop.folders.overrides / "v0.7.0/verl/utils/other.py.patch").read_text()
    assert not list(shop.folders.overrides.rglob("gradloc"))


def test_a_seam_that_was_undone_is_removed(shop):
    shop.edit(TRAINER, BASE[TRAINER])
    assert f"removed: {TRAINER}" in shop.take().out
    assert not (shop.seam(TRAINER)).exists()
    assert shop.result() == RESULT | {TRAINER: BASE[TRAINER]}


def test_an_ignored_new_file_is_listed_and_one_of_ours_is_taken_all_the_same(shop):
    (shop.clone / ".git/info/exclude").write_text("*.yaml\n*.log\n__pycache__/\n")
    shop.edit("verl/gradloc/table.yaml", "a: 1\n")
    shop.edit("verl/utils/run.log", "x\n")
    shop.edit("notes.txt", "x\n")
    shop.edit("verl/gradloc/__pycache__/hook.cpython-311.pyc", "x\n")
    outcome = shop.take()
    assert "taken: verl/gradloc/table.yaml" in outcome.out
    assert "left out, ignored by git or outside verl/: verl/utils/run.log" in outcome.out
    assert "left out, ignored by git or outside verl/: notes.txt" in outcome.out
    assert "pycache" not in outcome.out


def test_assume_unchanged_hides_no_edit(shop):
    world.git(shop.clone, "update-index", "--assume-unchanged", TRAINER)
    shop.edit(TRAINER, RESULT[TRAINER] + "more\n")
    assert f"taken: {TRAINER}" in shop.take().out


REFUSALS = {
    "deleted-file": (1, "was deleted", "verl/utils/other.py", None),
    "binary-added": (3, "is not UTF-8 text", "verl/gradloc/x.bin", b"\x00\xff"),
    "not-utf8": (3, "is not UTF-8 text", "verl/gradloc/x.py", b"\xff\n"),
    "crlf-introduced": (3, "carriage return", ACTOR, b"a\r\nb\r\n"),
    "no-final-newline": (3, "does not end in a newline", NEW, b"x = 1"),
    "empty-file": (3, "is empty", "verl/gradloc/__init__.py", b""),
    "bidi": (3, "U+202E", NEW, "x = 1  # \u202e\n".encode()),
    "zero-width": (3, "U+200B", NEW, "x = '\u200b'\n".encode()),
    "outside-tracked": (1, "lies outside verl/", "setup.py", b"x = 2\n"),
    "bad-name": (3, "may not stand in a patch", "verl/gradloc/a b.py", b"x = 1\n"),
    "case-collision": (3, "differ in case only", "verl/gradloc/Hook.py", b"x = 1\n"),
    "symlink": (3, "symbolic link", "verl/gradloc/link.py", "hook.py"),
    "mode-of-a-new-file": (3, "chmod 644", NEW, 0o755),
    "mode-of-a-seam": (3, "chmod 644", ACTOR, 0o755),
    "mode-of-verls": (3, "chmod 644", "verl/utils/other.py", 0o755),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_a_patch_must_not_carry_is_refused_by_name(shop, case):
    code, said, path, content = REFUSALS[case]
    place = shop.clone / path
    if content is None:
        place.unlink()
    elif isinstance(content, str):
        place.symlink_to(content)
    elif isinstance(content, int):
        place.chmod(content)
    else:
        place.write_bytes(content)
    if case.startswith("outside"):
        world.git(shop.clone, "add", "setup.py")
    assert path in shop.refused(code, said)


def test_a_checkout_at_another_commit_is_refused(shop):
    world.git(shop.clone, "checkout", "-q", "--orphan", "other")
    world.git(shop.clone, "commit", "-qm", "unrelated")
    shop.refused(1, "is not at the base")


@pytest.mark.parametrize("has_git", [False, True])
def test_an_archive_and_a_tree_in_the_users_own_history_are_taken(shop, has_git):
    root = shop.clone.parent / "vendored"
    world.write_tree(root, BASE)
    if has_git:
        for command in ("init -q", "add -A", "commit -qm theirs"):
            world.git(root, *command.split())
    assert world.run(shop.capsys, shop.patches, root).code == 0
    edits = {NEW: "edited = 1\n", "verl/gradloc/x.py": "x = 1\n"}
    world.write_tree(root, edits)
    outcome = shop.make("--repo", root)
    assert outcome.code == 0 and f"taken: {NEW}" in outcome.out, outcome.err
    assert shop.result() == RESULT | edits
    assert shop.make("--repo", root, "--head", "HEAD").code == 2


def test_a_source_of_the_package_has_one_line_of_licence_here_and_the_whole_head_there(shop):
    place = shop.folders.package / NEW.removeprefix(PACKAGE)
    place.write_text(SPDX + "edited = 1\n")
    assert shop.make().code == 0
    assert shop.result()[NEW] == LICENCE_HEAD + "edited = 1\n"
    world.run(shop.capsys, shop.patches, shop.clone)
    shop.edit(NEW, LICENCE_HEAD + "edited = 2\n")
    assert f"taken: {NEW}" in shop.take().out
    assert place.read_text() == SPDX + "edited = 2\n"


def test_a_checkout_without_edits_is_refused(shop):
    world.run(shop.capsys, shop.patches, shop.clone, "--reverse")
    assert "apply_patch.py" in shop.refused(1, "has no edits")


def test_edits_of_one_file_on_both_sides_are_refused_and_both_shown(shop):
    shop.edit(NEW, "def hook():\n    return 'checkout'\n")
    shop.folders.place("v0.7.0", NEW).write_text("def hook():\n    return 'overrides'\n")
    said = shop.refused(1, "was edited in the checkout and in the sources")
    assert NEW in said
    for text in ("'checkout'", "'overrides'", "None"):
        content = RESULT[NEW].replace("None", text).encode()
        assert world.blob_id(content)[:12] in said


def test_edits_of_two_files_on_two_sides_are_brought_together(shop):
    shop.edit(ACTOR, RESULT[ACTOR].replace("hook()", "hook(self)"))
    shop.folders.place("v0.7.0", NEW).write_text("def hook(actor):\n    return None\n")
    shop.take().expect(0, f"kept, newer in the sources: {NEW}")
    result = shop.result()
    assert "hook(self)" in result[ACTOR] and "hook(actor)" in result[NEW]


def test_the_same_file_can_be_edited_and_taken_again_and_again(shop):
    for number in range(3):
        shop.edit(NEW, f"edit = {number}\n")
        assert f"taken: {NEW}" in shop.take().out
        assert shop.result()[NEW] == f"edit = {number}\n"
    assert world.run(shop.capsys, shop.patches, shop.clone, "--reverse").code == 0
    assert world.files_of(shop.clone) == BASE


def test_after_a_take_the_checkout_can_be_brought_to_a_newer_build(shop):
    shop.edit(NEW, "edit = 1\n")
    shop.take()
    world.write_tree(shop.folders.package, {"other.py": "from_elsewhere = 1\n"})
    assert shop.make().code == 0
    assert world.run(shop.capsys, shop.patches, shop.clone).code == 0
    wanted = {NEW: "edit = 1\n", "verl/gradloc/other.py": "from_elsewhere = 1\n"}
    assert world.files_of(shop.clone) == RESULT | wanted


def test_a_checkout_with_an_older_build_brings_its_own_edits_only(shop):
    """Two people, two checkouts: the second take does not undo the first."""
    shop.folders.place("v0.7.0", NEW).write_text("def hook():\n    return 'first'\n")
    assert shop.make().code == 0
    shop.edit(TRAINER, RESULT[TRAINER] + "second\n")
    assert shop.take().code == 0
    result = shop.result()
    assert "first" in result[NEW] and result[TRAINER].endswith("second\n")


@pytest.mark.parametrize("where", ["user", "clone"])
def test_no_setting_of_git_changes_the_bytes(shop, monkeypatch, tmp_path, where):
    shop.edit(ACTOR, RESULT[ACTOR].replace("hook()", "hook(self)"))
    assert shop.take("--output", tmp_path / "plain.patch").code == 0
    settings = "diff.noprefix=true diff.mnemonicPrefix=true diff.context=9 diff.algorithm=patience"
    settings += " diff.external=/bin/false diff.interHunkContext=50 color.ui=always core.abbrev=7"
    settings += " core.quotePath=true core.autocrlf=true"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    place = ["--file", str(tmp_path / ".gitconfig")] if where == "user" else []
    for setting in settings.split():
        world.git(shop.clone, "config", *place, *setting.split("="))
    monkeypatch.setenv("GIT_DIFF_OPTS", "-u0")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "/bin/false")
    assert shop.take("--output", tmp_path / "again.patch").code == 0
    assert (tmp_path / "again.patch").read_bytes() == (tmp_path / "plain.patch").read_bytes()


def test_output_writes_a_patch_elsewhere_and_leaves_this_repository_alone(shop, tmp_path):
    shop.edit(NEW, "def hook():\n    return 1\n")
    with world.unchanged(*shop.places):
        out = tmp_path / "out put/mine.patch"
        assert shop.take("--output", out).code == 0
    fresh = world.write_tree(tmp_path / "fresh", BASE)
    options = ("--repo", fresh, "--patch-file", out)
    assert world.run(shop.capsys, shop.patches, *options).code == 0, "its .sha256 lies beside it"
    assert world.files_of(fresh) == RESULT | {NEW: "def hook():\n    return 1\n"}


def test_head_takes_a_commit_and_not_the_work_tree(shop, tmp_path):
    world.git(shop.clone, "add", "-A")
    world.git(shop.clone, "commit", "-qm", "patched")
    shop.edit(NEW, "not committed\n")
    out = tmp_path / "head.patch"
    assert shop.take("--base", shop.commit, "--head", "HEAD", "--output", out).code == 0
    assert {file.path for file in parse(out.read_bytes())} == {
        path for path in RESULT if RESULT[path] != BASE.get(path)
    }
    assert "not committed" not in out.read_text()
    shop.refused(1, "has no commit", "--head", "nowhere")
    shop.refused(2, "--output", "--base", "HEAD")


@pytest.mark.parametrize("options", [("--head", "HEAD"), ("--output", "x"), ("--check", "--repo", "x")])
def test_options_that_make_no_sense_together_are_refused(shop, options):
    assert shop.make(*options).code == 2


def test_a_concurrent_run_is_refused(shop):
    folder = shop.folders.overrides.parent / ".gradloc/make_patch"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        shop.refused(6, "another run is at work")


CONFIG = "verl/trainer/config"


@pytest.fixture
def configured(base_tree, tmp_path):
    """The real verl's configuration, to be edited."""
    shutil.copytree(base_tree / CONFIG, tmp_path / "real" / CONFIG)
    return tmp_path / "real"


@pytest.mark.full
def test_the_generated_yaml_of_the_real_base_is_fresh_and_can_be_refreshed(configured):
    pytest.importorskip("hydra")
    generated.check(configured)
    edited = configured / CONFIG / "actor/actor.yaml"
    edited.write_text(edited.read_text().replace("grad_clip: 1.0", "grad_clip: 2.0"))
    actor = configured / CONFIG / "actor/dp_actor.yaml"
    actor.write_text(actor.read_text().replace("grad_clip: 1.0", "grad_clip: 2.0"))
    with pytest.raises(IntegrityError) as caught:
        generated.check(configured)
    assert caught.value.reason == "take-stale-yaml"
    assert f"{CONFIG}/_generated_ppo_trainer.yaml" in caught.value.what
    stale = generated.stale(configured)
    assert f"{CONFIG}/_generated_ppo_trainer.yaml" in stale
    world.write_tree(configured, {path: data.decode() for path, data in stale.items()})
    generated.check(configured)


def test_a_configuration_that_does_not_compose_is_refused(configured):
    pytest.importorskip("hydra")
    (configured / CONFIG / "ppo_trainer.yaml").write_text("defaults:\n  - nowhere\n")
    with pytest.raises(IntegrityError) as caught:
        generated.check(configured)
    assert caught.value.reason == "take-config-broken"


def test_stale_generated_yaml_is_refused_with_the_command_that_refreshes_it(shop, monkeypatch):
    monkeypatch.setattr(generated, "generate", lambda root, name: b"another\n")
    for name in generated.SPECS:
        shop.edit(f"{CONFIG}/{name}", "stale\n")
    monkeypatch.setattr(generated, "can_check", lambda: True)
    shop.edit(f"{CONFIG}/actor.yaml", "a: 1\n")
    said = shop.refused(3, "_generated_ppo_trainer.yaml")
    assert f"make_patch.sh --repo '{shop.clone}' --refresh-generated" in said
    shop.take("--refresh-generated").expect(0, f"refreshed: {CONFIG}/_generated_ppo_trainer.yaml")
    assert shop.result()[f"{CONFIG}/_generated_ppo_trainer.yaml"] == "another\n"


def test_without_hydra_the_skipped_check_is_said(shop, monkeypatch):
    monkeypatch.setattr(generated, "can_check", lambda: False)
    shop.edit(f"{CONFIG}/actor.yaml", "a: 1\n")
    shop.take().expect(0, "was not checked: no hydra")


def test_check_shows_the_difference_and_writes_nothing(shop):
    shop.folders.place("v0.7.0", NEW).write_text("def hook():\n    return 2\n")
    with world.unchanged(shop.patches):
        shop.make("--check").expect(3, "bash make_patch.sh", "+    return 2", "-+    return None")


def test_nothing_is_written_when_the_edits_cannot_be_built(shop):
    shop.edit(NEW, "fine = 1\n")
    stray = shop.folders.package / "link.py"
    stray.symlink_to("elsewhere.py")
    assert "link.py" in shop.refused(3, "link")
    assert stray.is_symlink()


@pytest.mark.parametrize("damage", ["path", "preamble", "base", "both"])
def test_damaged_sources_do_not_build(shop, damage):
    place = shop.seam(ACTOR)
    text = place.read_text()
    if damage == "path":
        place.rename(place.with_name("other.py.patch"))
    elif damage == "preamble":
        place.write_text("Words.\n" + text)
    elif damage == "base":
        place.write_text(text.replace(world.blob_id(BASE[ACTOR].encode()), "1" * 40))
    else:
        world.write_tree(shop.folders.overrides / "v0.7.0", {ACTOR: "a copy\n"})
    with world.unchanged(shop.patches):
        assert shop.make().code == 3


def test_the_committed_patches_are_what_the_sources_build():
    folders = Folders(ROOT / "gradloc", ROOT / "verl_overrides")
    trees = {base: bases.ensure_base(base.tag) for base in bases.PINNED}
    for name, data in compose(folders, trees).items():
        assert (ROOT / "patches" / name).read_bytes() == data, f"patches/{name} is stale"
