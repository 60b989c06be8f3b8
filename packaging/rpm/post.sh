if ! getent passwd pgapace >/dev/null; then
    useradd --system --user-group --home-dir /var/lib/pgapace --no-create-home \
        --shell /sbin/nologin --comment pgapace pgapace
fi
install -d -o root -g pgapace -m 0750 /etc/pgapace
install -d -o pgapace -g pgapace -m 0700 /var/lib/pgapace
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
    # An upgrade: those that run continue with the new program. They lose nothing.
    # A unit is ready when it streams, which may take hours: the package manager must not wait for it.
    if [ "$1" -gt 1 ]; then
        systemctl --no-block try-restart 'pgapace@*.service' || :
    fi
fi
