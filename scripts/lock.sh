#!/usr/bin/env bash
# Writes the lock files: all packages and their dependencies, for all platforms, with versions and
# hashes. Run it after a change of the requirements.
#
#   scripts/lock.sh              keeps locked versions if the requirements allow them
#   scripts/lock.sh --upgrade    takes the newest versions that the requirements allow
#
# Needs uv, which requirements/dev.txt names, and both package indexes.
# In requirements/:
#   torch-cpu.lock  from PyTorch's index of CPU builds: torch alone
#   torch-gpu.lock  from the default index: torch with CUDA, and CUDA's libraries
#   service.lock    from the default index: everything else of the service, on any device
#   launcher.lock   from service.lock: what the launcher needs before it installs the rest
#   verify.lock     from the default index: what tools.verify, tools.evaluate and GLiNER2 need besides
#   dev.lock        from the default index: what run_tests.sh needs besides
#   docs.lock       from the default index: what scripts/build_docs.sh needs
# Environments whose versions a person chooses get their hashes: clients.txt, cluster.txt, fuzz.txt,
# manifests.txt, references.txt, sie.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PWD/.venv-tests/bin:$PATH

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
of_cuda='/^[a-z0-9]/ { cuda = /^(torch=|triton=|nvidia-|cuda-)/ } { print > (cuda ? torch : rest) }'

compile() {
  uv pip compile --quiet --universal --python-version "${python:-3.11}" --no-header --no-annotate \
    --no-emit-index-url --generate-hashes "$@"
}
head_of() {
  echo "# Made by scripts/lock.sh from $1: change that, and run it again."
}

# uv keeps the versions that are in the output file.
cat requirements/torch-gpu.lock requirements/service.lock > "$work/all" 2>/dev/null || true
compile requirements-gpu.txt "$@" --output-file "$work/all"
head_of "requirements-gpu.txt" > "$work/torch"
head_of "requirements-cpu.txt and requirements-gpu.txt" > "$work/rest"
awk -v torch="$work/torch.body" -v rest="$work/rest.body" "$of_cuda" "$work/all"
cat "$work/torch.body" >> "$work/torch"
cat "$work/rest.body" >> "$work/rest"

{ head_of "requirements/service.lock"; awk '/^[a-z0-9]/ { wanted = /^(packaging|python-dotenv)==/ }
  wanted' "$work/rest"; } > "$work/launcher"

cat requirements/verify.lock "$work/rest" "$work/torch" > "$work/verify" 2>/dev/null || true
compile requirements/verify.txt --constraints "$work/rest" --constraints "$work/torch" \
  "$@" --output-file "$work/verify"
head_of "requirements/verify.txt" > "$work/verify.whole"
cat "$work/rest" "$work/torch" > "$work/known"
awk -F== 'NR == FNR { known[$1]; next } /^[a-z0-9]/ { new = !($1 in known) } new' \
  "$work/known" "$work/verify" >> "$work/verify.whole"

cp requirements/dev.lock "$work/dev" 2>/dev/null || true
compile requirements/dev.txt --constraints "$work/rest" --constraints "$work/torch" \
  --constraints "$work/verify.whole" "$@" --output-file "$work/dev"
{ head_of "requirements/dev.txt"; cat "$work/dev"; } > "$work/dev.whole"

cp requirements/docs.lock "$work/docs" 2>/dev/null || true
compile requirements/docs.txt "$@" --output-file "$work/docs"
{ head_of "requirements/docs.txt"; cat "$work/docs"; } > "$work/docs.whole"

for name in clients cluster fuzz manifests references sie; do
  # SIE's client has no older versions of its packages.
  [[ $name == sie ]] && python=3.12
  { grep '^#' "requirements/$name.txt"; compile --no-deps "requirements/$name.txt"; } > "$work/$name"
done

cp "$work/docs.whole" requirements/docs.lock
cp "$work/torch" requirements/torch-gpu.lock
cp "$work/rest" requirements/service.lock
cp "$work/launcher" requirements/launcher.lock
cp "$work/verify.whole" requirements/verify.lock
cp "$work/dev.whole" requirements/dev.lock
for name in clients cluster fuzz manifests references sie; do
  cp "$work/$name" "requirements/$name.txt"
done
python3 scripts/lock_torch.py
