#!/bin/sh
# What "make setup" does: Debian packages, a virtual environment from the hashed lock, programs for the tests.
# Run from the root of the clone, as root. What is there already is left alone, so a second run takes a second.
set -eu

fail() {
    echo "setup: error: $*" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || fail "needs root, because the tests mount and run containers; run: sudo make ${MAKE_GOAL:-setup}"
[ -f pyproject.toml ] || fail "run it from the root of the clone"
# shellcheck disable=SC1091
. /etc/os-release
[ "${ID:-}" = debian ] || fail "this is ${PRETTY_NAME:-an unknown system}; the set-up knows Debian 12 and 13 only"

# python3-venv: the environment below; debootstrap, gpgv: images of real Debian; zstd, attr, skopeo, patch, bsdtar: what the
# tests check with; libseccomp2: the privately unpacked runc; gcc, libc6-dev, python3-dev, pkg-config: pystemd (libsystemd-dev) and
# pyfuse3 (libfuse3-dev), which have no wheels; the rest is in any but the smallest installation.
missing=""
for package in python3-venv ca-certificates git debootstrap gpgv zstd attr skopeo patch libarchive-tools libseccomp2 \
    gcc libc6-dev python3-dev pkg-config libsystemd-dev libfuse3-dev mount util-linux e2fsprogs xz-utils; do
    status=$(dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null || true)
    [ "$status" = "install ok installed" ] || missing="$missing $package"
done
if [ -n "$missing" ]; then
    echo "setup: installing Debian packages:$missing" >&2
    apt="apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3"
    export DEBIAN_FRONTEND=noninteractive
    $apt update || fail "apt-get update failed; look at /etc/apt/sources.list and the network"
    # shellcheck disable=SC2086
    $apt install --yes --no-install-recommends $missing >/dev/null || fail "apt-get install$missing failed"
fi

python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than 3.11; set PYTHON to a newer one"
[ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null || { rm -rf .venv && "$python" -m venv .venv; }
wanted=$(cat requirements-build.lock requirements.lock pyproject.toml | sha256sum)
if [ "$(cat .venv/weenv-installed 2>/dev/null || true)" != "$wanted" ] || [ ! -x .venv/bin/weenv ]; then
    echo "setup: installing the locked Python packages into .venv" >&2
    pip=".venv/bin/python -m pip --disable-pip-version-check --quiet"
    # What builds is there before what is built, so nothing but what the locks name is fetched, and no build environment is made.
    for lock in requirements-build.lock requirements.lock; do
        $pip install --root-user-action=ignore --require-hashes --no-build-isolation --requirement $lock ||
            fail "pip could not install $lock; look at the lines above"
    done
    $pip install --root-user-action=ignore --no-deps --no-index --no-build-isolation --editable . ||
        fail "pip could not install the project itself"
    echo "$wanted" >.venv/weenv-installed
fi

"$python" integration/weenv_testkit/fetch_tools.py

# As an installed package has it. Where PYTHONDONTWRITEBYTECODE is set, pip leaves it out too, and every command of the tests and
# the benchmark would compile thousands of files before it begins.
.venv/bin/python -m compileall -q -j 0 .venv/lib core layer registry converter plugin environment cli || true
