#!/bin/sh
# Moves the clients of PgBouncer to another server. An example for the commands of pgapace switchover:
#
#   pgapace switchover --go …   --stop-writes 'switchover.sh pause' --resume-writes 'switchover.sh resume' \
#                               --open 'switchover.sh open new'
#   pgapace switchover --back … --stop-writes 'switchover.sh pause' --resume-writes 'switchover.sh resume' \
#                               --open 'switchover.sh open old'
#
# Clients stay connected to PgBouncer and see no error: they wait from "pause" to "open", or to "resume", which
# undoes "pause". Every command may be repeated.
#
# pgbouncer.ini includes the entry of the database, and the role below is in admin_users:
#
#   [databases]
#   %include /etc/pgbouncer/databases.ini
#
# databases.ini is a symbolic link to one of these files. "open" changes the link:
#
#   databases.old.ini:  shop = host=old.example.com port=5432
#   databases.new.ini:  shop = host=new.example.com port=5432
#
# With pool_mode = transaction, "pause" waits for open transactions. With pool_mode = session it waits until
# clients disconnect, so that it is of no use there. Several PgBouncers need these commands on each of them,
# for example with ssh: first all pause, then all open.
set -eu

database=${PGBOUNCER_DATABASE:?name of the database in PgBouncer}
admin=${PGBOUNCER_ADMIN:-host=/var/run/postgresql port=6432 dbname=pgbouncer user=pgbouncer}
directory=${PGBOUNCER_DIRECTORY:-/etc/pgbouncer}

console() { psql -X -q -v ON_ERROR_STOP=1 "$admin" "$@"; }

# A column of SHOW DATABASES.
shown() {
  console -A -F '|' -c 'SHOW DATABASES' | awk -F '|' -v database="$database" -v column="$1" '
    NR == 1 { for (i = 1; i <= NF; i++) place[$i] = i; next }
    $1 == database { print $place[column] }'
}

resume() {
  # RESUME of a database that is not paused is an error.
  if [ "$(shown paused)" = 1 ]; then console -c "RESUME $database"; fi
}

case ${1:-} in
pause)
  console -c "PAUSE $database"
  ;;
resume)
  resume
  ;;
open)
  entry=databases.${2:?old or new}.ini
  host=$(sed -n "s/^$database *=.*host=\([^ ]*\).*/\1/p" "$directory/$entry")
  [ -n "$host" ] || { echo "$directory/$entry has no host for $database" >&2; exit 1; }
  ln -s "$entry" "$directory/databases.ini.$$"
  mv -f "$directory/databases.ini.$$" "$directory/databases.ini"
  # It succeeds even if PgBouncer cannot read the file.
  console -c RELOAD
  [ "$(shown host)" = "$host" ] || { echo "PgBouncer does not lead to $host" >&2; exit 1; }
  resume
  ;;
*)
  echo "usage: $0 pause | resume | open old | open new" >&2
  exit 2
  ;;
esac
