#!/bin/sh
# Installs a package built by build.sh in a clean Debian, uses it, upgrades, removes and purges it:
# try.sh FILE.deb. As root; wants debootstrap and a Debian mirror. Ends with 0 if all of it went well.
set -eu
package=$(readlink -f "$1")
root=$(mktemp -d)
end() {
  kill $(jobs -p) 2>/dev/null || true
  umount "$root/run" "$root/proc" "$root/dev" 2>/dev/null || true
  rm -rf --one-file-system "$root"
}
trap end EXIT
inside="chroot $root env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8"
inside="$inside DEBIAN_FRONTEND=noninteractive"
say() { echo "== $*"; }

say "a clean Debian"
debootstrap --variant=minbase "${SUITE:-bookworm}" "$root" >/dev/null
if [ -d /etc/apt/apt.conf.d ]; then cp -a /etc/apt/apt.conf.d/. "$root/etc/apt/apt.conf.d/"; fi
chmod 755 "$root"
mount --bind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/run"
cp "$package" "$root/tmp/gpuwatch.deb"

say "installs with what it depends on"
$inside apt-get -qq update
$inside apt-get -qqy install --no-install-recommends /tmp/gpuwatch.deb >/dev/null
$inside gpuwatch --version
$inside id gpuwatch
$inside systemctl is-enabled gpuwatch.service
$inside systemd-analyze verify --man=no gpuwatch.service

say "runs as its user and serves metrics"
$inside install -d -o gpuwatch -g gpuwatch /run/gpuwatch /var/lib/gpuwatch
$inside setpriv --reuid=gpuwatch --regid=gpuwatch --init-groups \
  gpuwatch run --source simulated --config /etc/gpuwatch/config.toml \
  --path.runtime /run/gpuwatch --path.state /var/lib/gpuwatch --web.listen-address 127.0.0.1:0 \
  >"$root/tmp/log" 2>&1 &
port=
for _ in $(seq 60); do
  if ! kill -0 $! 2>/dev/null; then break; fi
  port=$(sed -n 's/.*ready: serving.*127.0.0.1:\([0-9]*\).*/\1/p' "$root/tmp/log" | head -n 1)
  if [ -n "$port" ]; then break; fi
  sleep 1
done
if [ -z "$port" ]; then cat "$root/tmp/log"; exit 1; fi
$inside /opt/gpuwatch/bin/python -c "
import time, urllib.request
for _ in range(60):
    page = urllib.request.urlopen('http://127.0.0.1:$port/metrics', timeout=5).read()
    if b'gpuwatch_gpu_power_watts{' in page:
        break
    time.sleep(0.5)
else:
    raise SystemExit('no power of a GPU on the page')
"
kill -TERM $!
wait $! || true

say "upgrades and keeps state and config"
echo kept >"$root/var/lib/gpuwatch/of-the-user"
echo '# of the administrator' >>"$root/etc/gpuwatch/config.toml"
$inside dpkg -i /tmp/gpuwatch.deb >/dev/null
test -e "$root/var/lib/gpuwatch/gpuwatch.sqlite"
grep -q kept "$root/var/lib/gpuwatch/of-the-user"
grep -q 'of the administrator' "$root/etc/gpuwatch/config.toml"

say "is removed, and keeps state and config"
$inside apt-get -qqy remove gpuwatch >/dev/null
test ! -e "$root/opt/gpuwatch"
test ! -e "$root/usr/bin/gpuwatch"
test -e "$root/var/lib/gpuwatch/of-the-user"
if pgrep -f "^/opt/gpuwatch/bin/python" >/dev/null; then echo "still runs"; exit 1; fi

say "comes back, is purged, and leaves nothing"
$inside dpkg -i /tmp/gpuwatch.deb >/dev/null
$inside systemctl is-enabled gpuwatch.service
$inside apt-get -qqy purge gpuwatch >/dev/null
left=$(find "$root" -xdev -name '*gpuwatch*' ! -path "$root/tmp/*" ! -path '*/dpkg/*' ! -path '*/apt/*')
if [ -n "$left" ]; then echo "left: $left"; exit 1; fi
say "all well"
