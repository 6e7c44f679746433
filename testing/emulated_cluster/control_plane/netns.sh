#!/bin/sh
# Runs a command in a separate network namespace, so that concurrent test runs do not conflict. In the namespace, a
# program can bind and reach every 10.244.x.y (pods) and 10.0.0.y (Services), but no other address of the machine. The
# namespace forwards packets between pods that have their own namespaces.
# Usage: testing/emulated_cluster/control_plane/netns.sh COMMAND [ARGUMENT...]
set -eu

for needed in unshare:util-linux ip:iproute2; do
    command -v "${needed%%:*}" >/dev/null || {
        echo "netns.sh: ${needed%%:*} not found; on Debian or Ubuntu: apt-get install ${needed##*:}" >&2
        exit 1
    }
done

# Root may create a network namespace directly. Other users, and root in most containers, first need a user namespace.
# Pods of the tests run as various users, so the user namespace needs all users. A process outside the namespace
# writes this mapping, because the shell in the namespace has no permission.
as_it_is='exec unshare --net "$@"'
with_all_users='
    own=$(readlink /proc/self/ns/user)
    ( (
        for _ in $(seq 500); do
            test "$(readlink "/proc/$$/ns/user")" = "$own" || break
            sleep 0.01
        done
        echo 0 0 65536 >"/proc/$$/uid_map" && echo 0 0 65536 >"/proc/$$/gid_map"
    ) & )
    exec unshare --user --net sh -c "
        for _ in \$(seq 500); do
            test \$(id -g) != 0 || exec \"\$@\"
            sleep 0.01
        done
        exit 1" sh "$@"'
with_one_user='exec unshare --map-root-user --net "$@"'
for way in "$as_it_is" "$with_all_users" "$with_one_user" ""; do
    test -z "$way" || sh -c "$way" sh true 2>/dev/null && break
done
if test -z "$way"; then
    echo "netns.sh: this machine lets you make no network namespace: run as root, or allow user namespaces" \
        "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0;" \
        "docker run --security-opt seccomp=unconfined)" >&2
    exit 1
fi

# Go programs would send requests for pods to an HTTP proxy, but the namespace has no route to the proxy.
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
exec sh -c "$way" sh sh -c 'ip link set lo up &&
    ip route add local 10.244.0.0/16 dev lo && ip route add local 10.0.0.0/24 dev lo &&
    { echo 1 2>/dev/null >/proc/sys/net/ipv4/ip_forward || :; } && exec "$@"' sh "$@"
