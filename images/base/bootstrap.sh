#!/bin/sh
# Makes a base root file system of Debian 12 as a tar, the same bytes each time for the same package versions.
#
#   bootstrap.sh runtime|toolchain OUT.tar OUT.packages
#
# runtime    what the final image stands on: Python, certificates, no compiler
# toolchain  runtime plus a C++ compiler and Python's headers: the build stage only
#
# The mirror is the one that this machine's apt uses, or FERRY_DEBIAN_MIRROR and FERRY_DEBIAN_SECURITY (a dated archive
# of Debian, for instance, to rebuild an old base). No trace of it stays in the tar. Needs mmdebstrap, and root or user
# namespaces.
#
# OUT.packages lists name=version of every package. `runner/image.py` compares it with the committed list beside this
# script; security updates leave the mirrors' older versions behind, so that comparison reports and does not refuse
# (docs: the image's digest, which every run pins, is what refuses).
set -eu

SUITE=bookworm
# Times newer than this are set to it. Any fixed moment does.
SOURCE_DATE_EPOCH=1767225600
umask 022

packages=python3,python3-venv,ca-certificates
case "${1:-}" in
    runtime) ;;
    toolchain) packages="$packages,python3-dev,g++" ;;
    *) echo "usage: $0 runtime|toolchain OUT.tar OUT.packages" >&2; exit 2 ;;
esac
out_tar=$2
out_packages=$3

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

command -v mmdebstrap > /dev/null ||
    fail "mmdebstrap is missing, and the base image is made with it. Install it: apt-get install mmdebstrap"

# apt resolves deb822 and one-line sources alike; LABEL tells Debian's own archive from everybody else's.
site_of() {
    apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' "Label: $1" 2> /dev/null |
        grep -v -e '^copy:' -e '^cdrom:' | head -n 1
}
mirror=${FERRY_DEBIAN_MIRROR:-$(site_of Debian)}
security=${FERRY_DEBIAN_SECURITY:-$(site_of Debian-Security)}
[ -n "$mirror" ] && [ -n "$security" ] ||
    fail "This machine's apt sources name no Debian mirror (or 'apt-get update' has never run here)." \
        "Run apt-get update, or set FERRY_DEBIAN_MIRROR and FERRY_DEBIAN_SECURITY to the mirror's addresses."

# The operator's own way to the mirror (a proxy, a mirror that is frozen on purpose) holds here too; without one, apt's
# defaults do. Quoted for mmdebstrap as apt's configuration wants it.
set --
for setting in Acquire::Check-Valid-Until Acquire::http::Proxy Acquire::https::Proxy; do
    value=
    eval "$(apt-config shell value "$setting")"
    [ -z "$value" ] || set -- "$@" --aptopt="$setting \"$value\""
done

keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keyring" ] || fail "$keyring is missing: apt-get install debian-archive-keyring"

# Byte code is checked by nothing at run time (unchecked-hash), so that it is valid whatever happens to the times of
# the source files, and imports stay fast on a read-only root. -f, and no byte code written by importing: compileall
# would leave alone what its own imports have written a moment before, with the times of the source in it.
# Of the caller's environment only the way to the mirror gets in: one that had PYTHONDONTWRITEBYTECODE, and one that
# had not, once made two bases that differed.
env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/nonexistent LC_ALL=C.UTF-8 TZ=UTC TMPDIR="${TMPDIR:-/tmp}" \
    SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1 \
    ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} ${no_proxy:+no_proxy="$no_proxy"} \
    mmdebstrap --quiet --variant=minbase --architectures=amd64 --include="$packages" "$@" \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/info/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook='rm -f "$1"/etc/apt/sources.list.d/* "$1/etc/apt/apt.conf.d/99mmdebstrap"' \
    --customize-hook='echo "# no package is installed into a running image; see lockfiles/" > "$1/etc/apt/sources.list"' \
    --customize-hook='find "$1/usr/lib" "$1/usr/share" -name __pycache__ -prune -exec rm -rf {} +' \
    --customize-hook='chroot "$1" python3 -m compileall -q -f --invalidation-mode unchecked-hash /usr/lib/python3.11' \
    "$SUITE" "$out_tar" \
    "deb [signed-by=$keyring] $mirror $SUITE main" \
    "deb [signed-by=$keyring] $mirror $SUITE-updates main" \
    "deb [signed-by=$keyring] $security $SUITE-security main"

# From the tar and not by a hook: in a user namespace a hook may not write where its caller may.
tar --extract --to-stdout --file="$out_tar" ./var/lib/dpkg/status |
    awk '/^Package: / { name = $2 } /^Version: / { print name "=" $2 }' | LC_ALL=C sort -t = -k 1,1 > "$out_packages"
[ -s "$out_packages" ] || fail "$out_tar: no package is installed in it"
