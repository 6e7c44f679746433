#!/bin/sh
# Runs a command in a network namespace of its own, in which every 10.244.x.y (pods) and 10.0.0.y (Services) can be
# bound and reached and nothing else of the machine can: several runs at once do not meet. Packets are handed on between
# pods that have a namespace of their own.
# Usage: e2e/controlplane/netns.sh COMMAND [ARGUMENT...]
set -eu

for needed in unshare:util-linux ip:iproute2; do
    command -v "${needed%%:*}" >/dev/null || {
        echo "netns.sh: ${needed%%:*} not found; on Debian or Ubuntu: apt-get install ${needed##*:}" >&2
        exit 1
    }
done

# Root may make one as it is; everybody else, and root in most containers, becomes root of a user namespace for it.
if unshare --net true 2>/dev/null; then
    flags="--net"
elif unshare --map-root-user --net true 2>/dev/null; then
    flags="--map-root-user --net"
else
    echo "netns.sh: this machine lets you make no network namespace: run as root, or allow user namespaces" \
        "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0;" \
        "docker run --security-opt seccomp=unconfined)" >&2
    exit 1
fi

# A proxy is out of reach in there, and Go programs would ask it for pods' addresses.
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
# shellcheck disable=SC2086 # the flags are words
exec unshare $flags sh -c 'ip link set lo up && ip route add local 10.244.0.0/16 dev lo &&
    ip route add local 10.0.0.0/24 dev lo && { echo 1 2>/dev/null >/proc/sys/net/ipv4/ip_forward || :; } && exec "$@"' sh "$@"
