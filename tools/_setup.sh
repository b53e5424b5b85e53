# shellcheck shell=bash
# Sourced by the scripts of this folder: sets shardio up in .venv from nothing but bash and Python.
#
# Afterwards `bin` is the environment's folder of programs, and `has_clang` is yes or no: whether
# tinygrad's CPU device, which compiles its kernels with clang, works here; a script that sets
# `needs_clang=no` before does without. A script that sets `needs_browser=yes` gets a headless
# Chromium, if it can be had. PYTHON=... chooses the interpreter; nothing is installed outside .venv,
# but for clang and Chromium (and, where pip cannot be had otherwise, python3-venv) when this runs as
# root on a system with apt.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=$root/.venv/bin
has_clang=no
# Either would put foreign packages before those of .venv; PIP_USER would install past it.
unset PYTHONHOME PYTHONPATH
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "== $*"; }

fail() {
    printf '%s\n' "tools/$(basename "$0"): $*" >&2
    exit 3
}

# Print the newest final Python of at least 3.11. A name on PATH may be a shim that does not run.
find_python() {
    local name
    for name in ${PYTHON:-} python3.{25..11} python3 python; do
        command -v "$name" >/dev/null || continue
        "$name" -c 'import sys; v = sys.version_info
sys.exit(v < (3, 11) or v.releaselevel != "final")' >/dev/null 2>&1 || continue
        command -v "$name"
        return
    done
    fail "no Python of 3.11 or newer on PATH; install one (Debian, Ubuntu: apt-get install python3)" \
        "or name it: PYTHON=/path/to/python3.11 $0"
}

# Install Debian packages; false where that is not ours to do, or does not work.
install_packages() {
    [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 1
    say "installing $* with apt-get"
    export DEBIAN_FRONTEND=noninteractive
    # A fresh image has no package lists: fetch them when the first attempt finds nothing.
    apt-get install -qq -y --no-install-recommends "$@" >/dev/null 2>&1 ||
        { apt-get update -qq && apt-get install -qq -y --no-install-recommends "$@" >/dev/null; }
}

# Make .venv with pip inside. Debian splits ensurepip off into python3-venv, so without it `venv`
# fails; then pip's own wheel is fetched and installs itself.
make_environment() {
    local python folder wheel
    python=$(find_python) || exit 3
    say "making .venv with $("$python" --version) ($python)"
    rm -rf "$root/.venv"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$root/.venv" && return
        rm -rf "$root/.venv"
    fi
    say "this Python has no ensurepip: fetching pip itself"
    "$python" -m venv --without-pip "$root/.venv" ||
        fail "$python has no module venv; install python3-venv, or name a whole Python: PYTHON=... $0"
    folder=$(mktemp -d)
    if wheel=$("$bin/python" "$root/tools/_pip_wheel.py" "$folder") &&
        "$bin/python" "$wheel/pip" install -q --no-index "$wheel"; then
        rm -rf "$folder"
        return
    fi
    rm -rf "$folder" "$root/.venv"
    install_packages python3-venv && "$python" -m venv "$root/.venv" ||
        fail "cannot get pip; install it (Debian, Ubuntu: apt-get install python3-venv) and run again"
}

# Bring .venv up to date with pyproject.toml; costs nothing when it is.
setup_environment() {
    local stamp=$root/.venv/.up-to-date want
    want=$(printf '%s\n' "$root" && cksum <"$root/pyproject.toml")
    if [[ -f $stamp && $(<"$stamp") == "$want" ]] && "$bin/python" -c '' 2>/dev/null; then
        return
    fi
    # A working .venv of somebody's own making is used as it is; one of ours that came here with a
    # moved checkout is not: its programs name the interpreter of the old place.
    if ! "$bin/python" -c 'import pip' 2>/dev/null ||
        [[ -f $stamp && $(head -n 1 "$stamp") != "$root" ]]; then
        make_environment
    fi
    rm -f "$stamp"
    say "installing shardio, and what its tests need, into .venv: this takes a minute or two"
    "$bin/python" -m pip install -q -e "$root[dev]" || fail "pip could not install shardio (see above)"
    printf '%s\n' "$want" >"$stamp"
}

# True if tinygrad's CPU device can compile: it calls $CC or clang with a target only clang knows.
clang_compiles() {
    "$1" --target="$(uname -m)-none-unknown-elf" -x c -c - -o /dev/null </dev/null 2>/dev/null
}

setup_clang() {
    if clang_compiles "${CC:-clang}"; then
        has_clang=yes
        return
    fi
    # CC may name another compiler, for other programs: this one needs clang.
    unset CC
    if clang_compiles clang || { install_packages clang && clang_compiles clang; }; then
        has_clang=yes
    else
        say "clang is missing, so tinygrad cannot use the CPU here; install it:" \
            "sudo apt-get install --no-install-recommends clang"
    fi
}

setup_browser() {
    [[ -x /usr/bin/chromium-headless-shell ]] || install_packages chromium-headless-shell ||
        say "a browser is missing, so the page of shardio view is not tested here; install it:" \
            "sudo apt-get install --no-install-recommends chromium-headless-shell"
}

setup_environment
[[ ${needs_clang:-yes} == no ]] || setup_clang
[[ ${needs_browser:-no} == no ]] || setup_browser
