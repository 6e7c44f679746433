#!/bin/sh
# Installs the Debian packages that some tests need and that pip cannot install: buildah and mmdebstrap (the chart's
# images), busybox (a small root file system), chromium and its driver (the dashboard), promtool (alert rules), and
# libraries of Mooncake's master. The script unpacks promtool into the cache, because promtool's package would start a Prometheus. If all packages are
# installed, the script does nothing. If the installation fails, the script prints the tests that will be skipped.
# Usage: e2e/debian.sh
set -eu

unpacked="${XDG_CACHE_HOME:-$HOME/.cache}/dualmap/debian"

lacking=""
skipped=""
lacks() { # COMMAND PACKAGES TESTS
    command -v "$1" >/dev/null || { lacking="$lacking $2" skipped="$skipped; without $1: $3"; }
}
lacks buildah buildah "the tests of the image and of the chart on a cluster"
lacks mmdebstrap mmdebstrap "the same"
lacks busybox busybox-static "the kubelet's own tests of images"
lacks chromium "chromium fonts-liberation" "the dashboard in a browser"
lacks chromedriver chromium-driver "the same"
lib=libibverbs.so.1
ldconfig -p | grep -q $lib || {
    lacking="$lacking libibverbs1 libnl-3-200 libnl-route-3-200"
    skipped="$skipped; without $lib: the real KV store"
}
promtool=present
command -v promtool >/dev/null || [ -x "$unpacked/usr/bin/promtool" ] || {
    promtool=lacking skipped="$skipped; without promtool: the alert rules"
}
[ -n "$skipped" ] || exit 0

give_up() {
    echo "debian.sh: $1, so some tests are skipped$skipped" >&2
    exit 0
}
[ "$(id -u)" = 0 ] || give_up "not root"
[ -e /etc/debian_version ] && command -v apt-get >/dev/null || give_up "not Debian"

apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 -o APT::Sandbox::User=root "$@" >/dev/null
}
echo "debian.sh: installing$lacking$([ $promtool = present ] || echo ' promtool')" >&2
apt update || give_up "apt-get update failed"
# shellcheck disable=SC2086 # the packages are words
[ -z "$lacking" ] || apt install --yes --no-install-recommends $lacking || give_up "apt-get install failed"
if [ $promtool = lacking ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    (cd "$folder" && apt download prometheus) || give_up "apt-get download failed"
    mkdir -p "$unpacked"
    dpkg --fsys-tarfile "$folder"/prometheus_*.deb | tar --extract --directory "$unpacked" ./usr/bin/promtool
fi
