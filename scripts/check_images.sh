#!/usr/bin/env bash
# Builds the image for CPUs and runs its demo, without a container engine and without a registry.
#
#   scripts/check_images.sh           on a base from debootstrap
#   scripts/check_images.sh FOLDER    on the root folder of an earlier debootstrap
#
# Needs root on Debian with buildah, debootstrap, iproute2, util-linux and curl. The service runs as in
# a container: process 1, the image's user, a read-only root, its own network. pip in the build has
# this machine's configuration, and the folders that it names are mounted. All files are in one
# temporary folder (about 15 GB, see TMPDIR), which is always removed. CHECK_IMAGES_LIMIT=1800 is the
# time limit in seconds; SUITE and MIRROR are arguments of debootstrap.
set -euo pipefail

# Starts itself again in a mount namespace, which no mount can outlive.
if [[ ${1:-} != --inside ]]; then
  exec timeout --kill-after=60 "${CHECK_IMAGES_LIMIT:-1800}" \
    unshare --mount --propagation private "$(realpath "$0")" --inside "$@"
fi
shift
rootfs=${1:+$(realpath "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp --directory --tmpdir check-images.XXXXXX)
server=
image=localhost/smart-embedder:cpu
# buildah's folder for `--mount=type=cache`.
export TMPDIR=$work BUILDAH_ISOLATION=chroot

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }
fail() { printf 'check_images: %s\n' "$*" >&2; exit 1; }
engine() {
  buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"
}

clean_up() {
  local status=$? mount
  trap - EXIT INT TERM
  [[ -z $server ]] || kill -KILL "$server" 2>/dev/null || true
  # rm must not follow a mount into a folder of the host.
  while read -r mount; do
    umount --lazy "$mount" || true
  done < <(awk -v work="$work/" 'index($5, work) == 1 { print $5 }' /proc/self/mountinfo | sort -r)
  if grep --quiet --fixed-strings " $work/" /proc/self/mountinfo; then
    echo "check_images: $work is still mounted and stays" >&2
  else
    rm --recursive --force "$work"
  fi
  exit "$status"
}
trap clean_up EXIT
trap 'exit 143' INT TERM

# Writes pip's effective configuration to one file, and prints the options that mount the file and
# the paths in it.
pip_configuration() {
  python3 - "$work" "$(python3 -m pip config list 2>/dev/null)" <<'PY'
import ast, pathlib, re, sys
folder = pathlib.Path(sys.argv[1])
settings = {"retries": "1"}
for line in sys.argv[2].splitlines():
    name, _, value = line.strip().partition("=")
    settings[name.rpartition(".")[2]] = ast.literal_eval(value)
lines = [f"{name} = {' '.join(value.split())}" for name, value in settings.items()]
(folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
places = {place for value in settings.values() for place in re.findall(r"(?:^|\s|file://)(/\S+)", value)}
roots = {path for path in places if pathlib.Path(path).exists()}
# An index on disk may refer to files in its parent folder.
roots |= {str(pathlib.Path(path).parent) for path in roots if path.endswith("/simple")}
for path in sorted(roots):
    print(f"--volume={path}:{path}:ro")
print(f"--volume={folder}/pip.conf:/etc/pip.conf:ro")
PY
}

make_base() {
  local container root
  container=$(engine from scratch)
  root=$(engine mount "$container")
  if [[ -n $rootfs ]]; then
    cp --archive "$rootfs/." "$root"
  else
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
      "${SUITE:-bookworm}" "$root" ${MIRROR:+"$MIRROR"} > "$work/debootstrap.log" \
      || { tail "$work/debootstrap.log"; fail "debootstrap could not make a base"; }
  fi
  rm --recursive --force "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb \
    "$root"/var/lib/apt/lists/* "$root"/var/log/*
  engine config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  engine commit --quiet --rm "$container" localhost/base > "$work/base-id"
}

build() {
  local options
  pip_configuration > "$work/options"
  mapfile -t options < "$work/options"
  # The format `docker` has HEALTHCHECK; without --layers all would be one layer.
  engine build --format docker --layers --pull-never "${options[@]}" \
    --file Dockerfile.cpu --build-arg PYTHON_IMAGE=localhost/base --tag "$image" . \
    > "$work/build.log" 2>&1 || { tail --lines=50 "$work/build.log"; fail "the build has failed"; }
  grep -E '^\[[0-9/]+\] STEP ' "$work/build.log" | cut --characters=1-100
}

# Prints fields of the image's configuration.
facts() { engine inspect --type image --format "$1" "$image"; }

check_contents() {
  local container=$1
  # shellcheck disable=SC2016 # for the shell inside
  engine run "$container" -- sh -ec '
    for tool in cc gcc g++ c++ clang ld make cmake ninja pip pip3 git; do
      if command -v "$tool"; then echo "build tool left inside: $tool"; exit 1; fi
    done
    test "$(id -u):$(id -g)" = 1000:1000
    find / -xdev \( -path /proc -o -path /sys -o -path /dev \) -prune \
      -o -type d -writable -print 2>/dev/null | sort > /tmp/writable
    echo "user $(id -u), may write to: $(tr "\n" " " < /tmp/writable)"
    ! grep -vx -e /app/model_cache -e /run/lock -e /tmp -e /var/tmp /tmp/writable' \
    || fail "the service may write where it should not"
}

# Becomes process 1 of the image; called in new namespaces.
# shellcheck disable=SC2329 # called through declare -f
become_container() {
  local root=$1 cache=$2 user=$3 folder=$4
  shift 4
  ip link set lo up
  mount --bind "$root" "$root"
  mount --types proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount --types tmpfs -o size=64m,mode=1777 tmpfs "$root/tmp"
  mount --bind "$cache" "$root/app/model_cache"
  mount -o remount,bind,ro "$root"
  exec chroot --userspec="$user" "$root" env --ignore-environment --chdir="$folder" "$@"
}

start_server() {
  local root environment command
  install --directory --owner=1000 --group=1000 "$work/cache"
  root=$(engine mount "$1")
  mkdir --parents "$root/app/model_cache" "$root/proc" "$root/dev" "$root/tmp"
  mapfile -t environment < <(facts '{{range .Docker.Config.Env}}{{println .}}{{end}}' | grep .)
  mapfile -t command < <(facts '{{range .Docker.Config.Entrypoint}}{{println .}}{{end}}' | grep .)
  unshare --mount --pid --net --fork --kill-child=KILL -- \
    bash -euc "$(declare -f become_container); become_container \"\$@\"" bash \
    "$root" "$work/cache" "$(facts '{{.Docker.Config.User}}')" \
    "$(facts '{{.Docker.Config.WorkingDir}}')" "${environment[@]}" "${command[@]}" --demo \
    > "$work/server.log" 2>&1 &
  server=$!
}

process_1() { tr --delete ' ' < "/proc/$server/task/$server/children"; }
inside() { nsenter --target "$(process_1)" --net "$@"; }
ask() {
  local path=$1
  shift
  inside curl --silent --show-error --fail --max-time 120 "$@" "http://127.0.0.1:8000$path"
}

# Runs the image's health check as a container engine would.
run_health_check() {
  local check
  mapfile -t check < <(facts '{{range .Docker.Config.Healthcheck.Test}}{{println .}}{{end}}' | grep .)
  [[ ${check[0]} == CMD ]] || fail "the image has no health check in exec form"
  inside --mount --pid --root --setuid 1000 --setgid 1000 \
    env --chdir=/app PATH=/venv/bin:/usr/bin:/bin HOST=0.0.0.0 PORT=8000 "${check[@]:1}" 2>/dev/null
}

wait_until_healthy() {
  local start=$SECONDS
  until run_health_check; do
    kill -0 "$server" 2>/dev/null || { cat "$work/server.log"; fail "the server has ended"; }
    ((SECONDS - start < 300)) || { cat "$work/server.log"; fail "not healthy within 300 s"; }
    sleep 1
  done
  echo "healthy after $((SECONDS - start)) s"
}

call_endpoints() {
  ask /embeddings/ --json '{"sentences": ["What is hybrid search?"], "return_colbert": false}' \
    | jq_python 'print("dense:", len(a["data"][0]["embeddings"]["dense"]), "numbers; sparse:",
        len(a["data"][0]["embeddings"]["sparse"]), "tokens")'
  ask /rerank --json '{"query": "What is hybrid search?",
      "passages": ["A recipe for soup.", "Hybrid search joins dense and sparse vectors."]}' \
    | jq_python 'assert a["results"][0]["index"] == 1, a; print("rerank: passage 1 is first")'
}
jq_python() { python3 -c "import json, sys; a = json.load(sys.stdin); $1"; }

# Sends SIGTERM during a request, which must still be answered; the exit status must be 0.
stop_server() {
  local request status=0
  python3 -c 'import json; print(json.dumps({"sentences": ["hybrid search " * 150] * 48}))' \
    > "$work/large.json"
  ask /embeddings/ --json "@$work/large.json" --output "$work/answer.json" & request=$!
  until [[ $(ask /metrics) == *$'\nembedding_active_requests 1'* ]]; do
    kill -0 "$request" || fail "the request was over before the signal"
  done
  kill -TERM "$(process_1)"
  wait "$request" || fail "the accepted request was not answered"
  wait "$server" || status=$?
  server=
  ((status == 0)) || { cat "$work/server.log"; fail "exit status $status after SIGTERM"; }
  jq_python 'print("answered while draining:", len(a["data"]), "texts; exit status 0")' \
    < "$work/answer.json"
}

say "building the base";            make_base
say "building $image";              build
container=$(engine from --pull-never "$image")
say "contents";                     check_contents "$container"
say "starting the demo as process 1 on a read-only root"
start_server "$container"
wait_until_healthy
say "calling it";                   call_endpoints
say "SIGTERM";                      stop_server
say "the image works"
