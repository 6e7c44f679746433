#!/bin/sh
# Runs a command in a network namespace of its own, in which every 10.244.x.y (pods) and 10.0.0.y (Services) can be
# bound and reached and nothing else of the machine can: several runs at once do not meet. Packets are handed on between
# pods that have a namespace of their own.
# Usage: testing/emulated_cluster/control_plane/netns.sh COMMAND [ARGUMENT...]
set -eu

for needed in unshare:util-linux ip:iproute2; do
    command -v "${needed%%:*}" >/dev/null || {
        echo "netns.sh: ${needed%%:*} not found; on Debian or Ubuntu: apt-get install ${needed##*:}" >&2
        exit 1
    }
done

# Root may make one as it is; everybody else, and root in most containers, becomes root of a user namespace for it. Root
# there may still give it all of its users, which pods of the tests run as: what the shell becomes cannot, hence a second.
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

# A proxy is out of reach in there, and Go programs would ask it for pods' addresses.
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
exec sh -c "$way" sh sh -c 'ip link set lo up &&
    ip route add local 10.244.0.0/16 dev lo && ip route add local 10.0.0.0/24 dev lo &&
    { echo 1 2>/dev/null >/proc/sys/net/ipv4/ip_forward || :; } && exec "$@"' sh "$@"
