#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes docs/applier-transcript.md: the applier as a new user meets it, on a clone with verl's real
# history, on the released archive and on an installed package. Every line is what was printed.
#
#   bash scripts/applier_transcript.sh CLONE_OF_VERL > docs/applier-transcript.md
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
clone=$(cd -- "${1:?usage: bash scripts/applier_transcript.sh CLONE_OF_VERL}" && pwd -P)
base=$(cd -- "$here" && python3 -m patchkit.build.base)
commit=$(sed -n 's/^V070 = Base("v0.7.0", "\(.*\)")/\1/p' "$here/patchkit/build/base.py")
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

# A copy of this repository, so that taking edits changes the copy.
mkdir -p "$work/gradloc/.gradloc/base"
git -C "$here" archive HEAD | tar -x -C "$work/gradloc"
cp -r -- "$base" "$work/gradloc/.gradloc/base/"
git() { command git -c advice.detachedHead=false "$@"; }
git clone -q "$clone" "$work/verl"
git -C "$work/verl" checkout -q --detach "$commit"
git -C "$work/verl" worktree add -q --detach "$work/verl-2" "$commit"
cp -r -- "$base" "$work/verl-0.7.0"
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check --no-deps verl==0.7.0 2>/dev/null
site=$(cd "$work" && echo env/lib/python3*/site-packages)
cd "$work"

# Prints a command, runs it, prints what it says and its exit code where that is not 0.
show() {
    local code=0
    printf '$ %s\n' "$1"
    bash -c "$1" >out.txt 2>&1 || code=$?
    sed -E -e "s#$work#~#g" -e 's/sha256 [0-9a-f]{64}/sha256 .../' -e 's/[[:space:]]*$//' out.txt
    if [ "$code" -ne 0 ]; then printf '(exit code %s)\n' "$code"; fi
}

section() { printf '\n## %s\n\n```console\n' "$1"; }
end() { printf '```\n'; }

# Fresh from the built patch again: the section before has taken edits into the copy.
restore() { git -C "$here" archive HEAD patches gradloc verl_overrides | tar -x -C gradloc; }

cat <<TEXT
# A transcript of the applier

Made by \`bash scripts/applier_transcript.sh CLONE_OF_VERL\`; every line below was printed by the
commands. \`verl\` is a clone with verl's real history at the pinned commit, \`verl-0.7.0\` the released
source archive, \`env\` an environment with \`pip install --no-deps verl==0.7.0\`.
TEXT

section "A clone"
show "python3 gradloc/apply_patch.py --list --quiet"
show "python3 gradloc/apply_patch.py --repo verl --status"
show "python3 gradloc/apply_patch.py --repo verl --check"
show "python3 gradloc/apply_patch.py --repo verl"
show "git -C verl status --short"
show "python3 gradloc/apply_patch.py --repo verl"
end
section "Edit in the checkout, take the edits, put them on another checkout"
show "echo '# An edit of ours.' >> verl/verl/gradloc/trigger.py"
show "sed -i 's/^        self.gradloc = .*/&  # an edit of a seam/' verl/verl/workers/actor/dp_actor.py"
show "python3 gradloc/apply_patch.py --repo verl --status"
show "bash gradloc/make_patch.sh --repo verl"
show "python3 gradloc/apply_patch.py --repo verl --status"
show "python3 gradloc/apply_patch.py --repo verl-2"
show "diff -r verl/verl verl-2/verl && echo the two checkouts are the same"
show "python3 gradloc/apply_patch.py --repo verl-2 --reverse && git -C verl-2 status --short"
show "python3 gradloc/apply_patch.py --repo verl --reverse && git -C verl status --short"
end
restore
section "What it refuses"
show "python3 gradloc/apply_patch.py --repo verl/verl"
show "echo '# mine' >> verl/verl/workers/actor/dp_actor.py"
show "python3 gradloc/apply_patch.py --repo verl"
show "python3 gradloc/apply_patch.py --repo verl --force --quiet; git -C verl diff --stat"
show "git -C verl checkout -q -- verl/workers/actor/dp_actor.py"
show "python3 gradloc/apply_patch.py --repo verl --quiet"
show "git -C verl checkout -q -- verl/workers/actor/dp_actor.py"
show "python3 gradloc/apply_patch.py --repo verl"
show "python3 gradloc/apply_patch.py --repo verl --reverse --force"
show "git -C verl checkout -q HEAD~50 && python3 gradloc/apply_patch.py --repo verl"
show "git -C verl checkout -q $commit"
show "sed 's/hook/hack/' gradloc/patches/gradloc.patch > other.patch"
show "python3 gradloc/apply_patch.py --repo verl --patch-file other.patch"
end
section "The released archive, without git"
show "python3 gradloc/apply_patch.py --repo verl-0.7.0 --status"
show "python3 gradloc/apply_patch.py --repo verl-0.7.0"
show "echo '# An edit of ours.' >> verl-0.7.0/verl/gradloc/trigger.py"
show "bash gradloc/make_patch.sh --repo verl-0.7.0"
show "python3 gradloc/apply_patch.py --repo verl-2 --quiet && diff -r verl-0.7.0/verl/gradloc verl-2/verl/gradloc && echo the same"
show "python3 gradloc/apply_patch.py --repo verl-2 --reverse --quiet"
show "python3 gradloc/apply_patch.py --repo verl-0.7.0 --reverse"
show "diff -r gradloc/.gradloc/base/verl-0.7.0 verl-0.7.0 && echo exactly the archive"
end
restore
section "An installed package"
show "python3 gradloc/apply_patch.py --repo $site"
show "env/bin/python gradloc/apply_patch.py --installed --status"
show "env/bin/python gradloc/apply_patch.py --installed"
show "echo '# An edit of ours.' >> $site/verl/gradloc/trigger.py"
show "bash gradloc/make_patch.sh --repo $site"
show "python3 gradloc/apply_patch.py --repo verl-2 --quiet && diff -r $site/verl/gradloc verl-2/verl/gradloc && echo the same"
show "env/bin/python gradloc/apply_patch.py --installed --reverse"
show "diff -r -x __pycache__ -x version verl-0.7.0/verl $site/verl && echo exactly the package"
end
