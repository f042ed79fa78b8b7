"""Settings: one definition, four places to give them, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from psycopg.conninfo import conninfo_to_dict

from bridge import cli, config
from bridge import config as setting_values
from bridge.errors import SettingsError
from bridge.jetstream.connection import connection_options, options_of, servers_of
from bridge.postgres.connection import conninfo_of

SECRET = "s3cr3t-Word"


def load(flags=None, environ=None, file=None, tmp_path=None):
    path = None
    if file is not None:
        path = tmp_path / "bridge.toml"
        path.write_text(file)
    return config.load(flags or {}, environ or {}, str(path) if path else None)


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(tmp_path):
    file = 'slot = "from_file"\nport = 1111\npub = "file_pub"\nbatch-events = 7\n'
    environ = {"BRIDGE_SLOT": "from_env", "BRIDGE_PORT": "2222"}
    settings = load({"slot": "from_flag"}, environ, file, tmp_path)
    assert (settings.slot, settings.port, settings.pub) == ("from_flag", 2222, "file_pub")
    assert (settings.batch_events, settings.host) == (7, "127.0.0.1")
    path = str(tmp_path / "bridge.toml")
    assert settings.origins["slot"] == "flag --slot"
    assert settings.origins["port"] == "environment BRIDGE_PORT"
    assert settings.origins["pub"] == settings.origins["batch_events"] == f"file {path}"
    assert settings.origins["host"] == "default"


def test_the_config_file_can_be_named_in_the_environment(tmp_path):
    path = tmp_path / "b.toml"
    path.write_text('slot = "s1"')
    assert load({}, {"BRIDGE_CONFIG": str(path)}).slot == "s1"


def test_every_setting_can_be_given_in_every_way(tmp_path):
    samples = {
        "integer": "8", "flag": "true", "seconds": "9s", "bytes": "96KB", "text": "x",
        "command": "print 'a b'",
    }  # fmt: skip
    files = (
        "nats_creds", "nats_nkey", "nats_ca", "nats_cert", "nats_key", "nats_password_file",
        "pg_password_file", "http_cert", "http_key",
    )  # fmt: skip
    for item in config.definitions():
        kind = item.metadata["kind"]
        text = samples[kind]
        if item.metadata["choices"]:
            text = item.metadata["choices"][-1]
        if item.name in files:
            text = str(tmp_path / "file")
            (tmp_path / "file").write_text("")
        if item.name == "nats_inbox_prefix":
            text = "_INBOX_x"
        wanted = setting_values.parse(text, "here", item.metadata["kind"])
        for variable in config.environment_names(item):
            assert getattr(load({}, {variable: text}), item.name) == wanted, variable
        assert getattr(load({}, {}, f'{item.name} = "{text}"', tmp_path), item.name) == wanted
        if item.metadata["flag"]:
            assert getattr(load({item.name: text}), item.name) == wanted


def test_a_command_is_split_as_a_shell_does_or_given_as_a_list(tmp_path):
    wanted = ("aws", "rds", "a b", "$HOME")
    written = "aws rds 'a b' $HOME"
    assert load({"pg_password_command": written}).pg_password_command == wanted
    file = 'nats_password_command = ["aws", "rds", "a b", "$HOME"]'
    assert load({}, {}, file, tmp_path).nats_password_command == wanted
    with pytest.raises(SettingsError, match="is not a command"):
        load({"pg_password_command": "aws 'rds"})
    shown = {name: value for name, value, _ in config.masked(load({"pg_password_command": "a b"}))}
    assert (shown["pg_password_command"], shown["nats_password_command"]) == ("a b", "")


def test_a_password_has_one_source(tmp_path):
    path = tmp_path / "password"
    path.write_text(SECRET)
    environ = {"POSTGRES_BRIDGE_PASSWORD": SECRET}
    with pytest.raises(SettingsError, match="--pg-password-file are both given") as caught:
        load({"pg_password_file": str(path)}, environ)
    assert SECRET not in str(caught.value)
    two = {"nats_password_file": str(path), "nats_password_command": "date"}
    with pytest.raises(SettingsError, match="both given"):
        load(two)
    url = {"DATABASE_URL": f"postgresql://u:{SECRET}@h/d", "PG_HOST": "h"}
    with pytest.raises(SettingsError, match="DATABASE_URL holds a password") as caught:
        conninfo_of(load({"pg_password_file": str(path)}, url))
    assert SECRET not in str(caught.value)
    url = {"NATS_URL": f"nats://u:{SECRET}@h"}
    with pytest.raises(SettingsError, match="a password is given as well") as caught:
        options_of(load({"nats_password_file": str(path)}, url))
    assert SECRET not in str(caught.value)
    with pytest.raises(SettingsError, match="--nats-password-command: the user is missing"):
        options_of(load({"nats_password_command": "date"}))
    options = options_of(load({"nats_password_file": str(path)}, {"NATS_URL": "nats://u%40@h"}))
    assert options["user"] == "u@"
    assert SECRET not in conninfo_of(load({"pg_password_file": str(path)}))


def test_the_variables_of_the_contract_are_read():
    settings = load(
        {},
        {
            "PG_HOST": "db", "PG_PORT": "5555", "PG_DB": "shop", "POSTGRES_BRIDGE_USER": "cdc",
            "POSTGRES_BRIDGE_PASSWORD": SECRET, "NATS_HOST": "mq", "NATS_PORT": "4333",
            "NATS_BRIDGE_USER": "nu", "NATS_BRIDGE_PASSWORD": SECRET,
        },
    )  # fmt: skip
    parameters = conninfo_to_dict(conninfo_of(settings))
    assert {key: parameters[key] for key in ("host", "port", "dbname", "user", "password")} == {
        "host": "db", "port": "5555", "dbname": "shop", "user": "cdc", "password": SECRET,
    }  # fmt: skip
    options = options_of(settings)
    assert options["servers"] == ["nats://mq:4333"]
    assert (options["user"], options["password"]) == ("nu", SECRET)
    url = f"postgresql://u:{SECRET}@h:1/d"
    whole = load({}, {"DATABASE_URL": url, "NATS_URL": f"nats://a:{SECRET}@one:1, nats://two:2"})
    parameters = conninfo_to_dict(conninfo_of(whole))
    assert (parameters["host"], parameters["dbname"], parameters["user"]) == ("h", "d", "u")
    assert servers_of(whole) == (f"nats://a:{SECRET}@one:1", "nats://two:2")
    assert connection_options(whole).hosts == "one:1, two:2"


def test_a_part_given_closer_at_hand_wins_over_the_url_it_is_part_of():
    environ = {"DATABASE_URL": "postgresql://u:p@h:1/d", "NATS_URL": "nats://n:1"}
    settings = load({"pg_db": "other", "nats_port": "2"}, environ)
    parameters = conninfo_to_dict(conninfo_of(settings))
    assert (parameters["host"], parameters["dbname"]) == ("h", "other")
    assert servers_of(settings) == ("nats://127.0.0.1:2",)
    # At the same distance the whole wins: that is how it always was for libpq users.
    same = load({}, {**environ, "PG_HOST": "elsewhere", "NATS_HOST": "elsewhere"})
    assert conninfo_to_dict(conninfo_of(same))["host"] == "h"
    assert servers_of(same) == ("nats://n:1",)


def test_the_connection_fixes_how_values_are_printed():
    settings = load({"slot": "s"}, {"DATABASE_URL": "host=h options='-c datestyle=German'"})
    parameters = conninfo_to_dict(conninfo_of(settings))
    assert parameters["client_encoding"] == "UTF8"
    # The last one counts, so ours stand behind what the URL says.
    given = parameters["options"].removeprefix("-c ").split(" -c ")
    assert given == [
        "datestyle=German", "DateStyle=ISO", "TimeZone=UTC", "IntervalStyle=postgres",
        "extra_float_digits=1", "bytea_output=hex", "row_security=off", "search_path=",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"port": "many"}, "--port: 'many' is not a whole number"),
        ({"port": "70000"}, "--port: 70000 is not a port"),
        ({"port": "-1"}, "--port: '-1' is too small"),
        ({"pg_port": "70000"}, "--pg-port: 70000 is not a port"),
        ({"nats_port": "0"}, "--nats-port: '0' is too small"),
        ({"slot": "Upper"}, "--slot: 'Upper' is not a slot name"),
        ({"slot": "x" * 64}, "is not a slot name"),
        ({"prefix": "a.b"}, "--prefix: 'a.b' may hold only"),
        ({"on_gap": "ignore"}, "--on-gap: 'ignore' is not one of exit, new-epoch"),
        ({"origin": "all"}, "--origin: 'all' is not one of any, none"),
        ({"cdc_max_age": "8 weeks"}, "--cdc-max-age: '8 weeks' is not a duration"),
        ({"cdc_max_age": "-1s"}, "is not a duration"),
        ({"ring_bytes": "12XB"}, "--ring-bytes: '12XB' is not a size"),
        ({"ring_bytes": "1KB"}, "--ring-bytes: '1KB' is too small"),
        ({"ring_slots": "1000"}, "--ring-slots: 1000 is not a power of two"),
        ({"replicas": "0"}, "--replicas: '0' is too small"),
        ({"ring_slots": str(2**40)}, "--ring-slots: '1099511627776' is too large"),
        ({"cdc_max_age": "200000d"}, "--cdc-max-age: '200000d' is too large"),
        ({"cdc_max_bytes": "8388608TB"}, "--cdc-max-bytes: '8388608TB' is too large"),
        ({"cdc_stream": "X", "init_stream": "X"}, "--init-stream: 'X' is the other stream's name"),
        ({"cdc_stream": "INIT"}, "--cdc-stream: 'INIT' is the other stream's name"),
        ({"snapshot_chunk_rows": "0"}, "--snapshot-chunk-rows: '0' is too small"),
        ({"snapshot_chunk_rows": "10001"}, "'10001' is too large; the most is 10000"),
        ({"cdc_stream": "a.b"}, "--cdc-stream: 'a.b' is not a stream name"),
        ({"nats_creds": "/nowhere/x"}, "--nats-creds: no file /nowhere/x"),
        ({"log_level": "loud"}, "--log-level: 'loud' is not one of"),
        ({"json": "maybe"}, "--json: 'maybe' is not yes or no"),
        ({"pub": "a\0b"}, "--pub"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(flags, complaint):
    with pytest.raises(SettingsError) as refused:
        load(flags)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("slot = ", "not valid TOML"),
        ('slto = "a"', "unknown setting 'slto'"),
        ("[postgres]\nhost = 'x'", "unknown setting 'postgres'"),
        ("slot = 5", "slot: 5 is not a text"),
        ("port = true", "port: True is not a whole number"),
        ("batch_events = 7.5", "batch_events: 7.5 is not a whole number"),
        ("cdc_max_age = -5", "cdc_max_age: -5 is too small"),
        ("cdc_max_age = inf", "cdc_max_age: inf is not a duration"),
        ("wal_warning = nan", "wal_warning: nan is not a size"),
        ('json = "perhaps"', "json: 'perhaps' is not yes or no"),
        (f'pg_password = ["{SECRET}"]', "pg_password: *** is not a text"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path, file, complaint):
    with pytest.raises(SettingsError) as refused:
        load({}, {}, file, tmp_path)
    text = str(refused.value)
    assert complaint in text
    assert str(tmp_path / "bridge.toml") in text
    assert "\n" not in text
    assert SECRET not in text


def test_a_missing_or_unreadable_file_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="No such file"):
        config.load({}, {}, str(tmp_path / "none.toml"))
    with pytest.raises(SettingsError, match="directory"):
        config.load({}, {}, str(tmp_path))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not valid TOML"):
        config.load({}, {}, str(tmp_path / "binary.toml"))


def test_a_secret_in_an_address_on_the_command_line_works_as_elsewhere():
    url = f"postgresql://u:{SECRET}@h/d"
    assert load({"database_url": url}).database_url == url
    assert SECRET not in repr(load({"database_url": url}))


def test_secrets_have_no_flag_and_are_masked():
    environ = {
        "POSTGRES_BRIDGE_PASSWORD": SECRET, "NATS_BRIDGE_PASSWORD": SECRET,
        "BRIDGE_ADMIN_TOKEN": SECRET, "DATABASE_URL": f"postgresql://u:{SECRET}@h/d",
        "NATS_URL": f"nats://u:{SECRET}@h:4222",
    }  # fmt: skip
    settings = load({}, environ)
    rows = config.masked(settings)
    assert SECRET not in str(rows)
    assert SECRET not in repr(settings)
    shown = {name: (value, origin) for name, value, origin in rows}
    assert shown["pg_password"] == ("***", "environment POSTGRES_BRIDGE_PASSWORD")
    assert shown["admin_token"][0] == "***"
    assert shown["nats_password"][0] == "***"
    assert shown["database_url"] == ("***", "environment DATABASE_URL")
    assert shown["nats_url"][0] == "***"
    assert [name for name, *_ in rows] == [item.name for item in config.definitions()]
    for name in ("pg_password", "nats_password", "admin_token"):
        with pytest.raises(SettingsError, match="unrecognized arguments"):
            cli._parser("run").parse_args([f"--{name.replace('_', '-')}", SECRET])


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BRIDGE_ADMIN_TOKEN", "change-me"),
        ("POSTGRES_BRIDGE_PASSWORD", "CHANGE_ME"),
        ("BRIDGE_PG_PASSWORD", " changeme "),
        ("NATS_BRIDGE_PASSWORD", "Change Me"),
        ("DATABASE_URL", "postgresql://bridge:change-me@db:5432/app?sslmode=verify-full"),
        ("DATABASE_URL", "postgresql://bridge:change%2Dme@db/app"),
        ("DATABASE_URL", "postgresql://db/app?user=bridge&password=change-me"),
        ("DATABASE_URL", "host=db user=bridge password='change-me'"),
        ("NATS_URL", "nats://bridge:change-me@nats:4222"),
        ("NATS_URL", "nats://one:4222,nats://bridge:change-me@two:4222"),
        ("NATS_URL", "nats://change-me@nats:4222"),
        ("PGPASSWORD", "change-me"),
    ],
)
def test_the_bridge_does_not_start_with_the_password_of_an_example(
    capsys, monkeypatch, variable, value
):
    monkeypatch.setenv(variable, value)
    assert cli.main(["--slot", "s", "--pub", "p"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bridge: {variable}: the password or token of the example")


def test_a_secret_that_is_not_an_example_is_taken(tmp_path):
    environ = {
        "DATABASE_URL": "postgresql://change-me:own-word@change-me.example/change-me",
        "NATS_URL": "nats://change-me:own-word@nats:4222",
        "BRIDGE_ADMIN_TOKEN": "do-change-me-not",
        "BRIDGE_PG_HOST": "change-me",
    }
    assert config.example_secrets(load({}, environ), {}) == []
    both = load({}, {"NATS_BRIDGE_PASSWORD": "change-me"}, 'admin_token = "change-me"', tmp_path)
    assert config.example_secrets(both, {}) == [
        f"{tmp_path / 'bridge.toml'}: admin_token",
        "NATS_BRIDGE_PASSWORD",
    ]


def test_help_names_every_flag_its_variables_and_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        cli._parser("run").parse_args(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for item in config.definitions():
        if item.metadata["flag"]:
            assert config.flag_name(item) in text
            assert ", ".join(config.environment_names(item)) in text
    for default in ("default 8d", "default 16MB", "default 65536", "default 9090", "default 10s"):
        assert default in text


@pytest.mark.parametrize(
    ("command", "own", "told", "hidden"),
    [
        ("check", ["--json", "--fix-sql"], ["--slot", "--pub", "--on-gap"], ["--ring-bytes"]),
        ("drop", ["--yes"], ["--slot", "--pg-host"], ["--pub", "--json", "--batch-events"]),
    ],
)
def test_help_of_a_command_begins_with_its_own_flags(capsys, command, own, told, hidden):
    with pytest.raises(SystemExit):
        cli._parser(command).parse_args(["--help"])
    text = capsys.readouterr().out
    usage, _, flags = text.partition("\n\n")
    for flag in own:
        assert flag in usage
        assert flags.index(flag) < flags.index("--slot")
    for flag in told:
        assert flag in flags
    for flag in hidden:
        assert flag not in text
    assert "MessagePack" not in text


@pytest.mark.parametrize("command", ["check", "drop", "config"])
def test_every_command_takes_every_setting(command):
    flags = [
        word
        for item in config.definitions()
        if item.metadata["flag"]
        for word in ([config.flag_name(item)] + ["x"] * (item.metadata["kind"] != "flag"))
    ]
    options = cli._parser(command).parse_args(flags)
    assert (options.json, options.ring_bytes, options.zstd) == (True, "x", True)


def test_flags_are_not_abbreviated():
    with pytest.raises(SettingsError, match="unrecognized arguments"):
        cli._parser("run").parse_args(["--pu", "x"])


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2", 2), ("1.5m", 90), ("3 h", 10800), ("8D", 691200)]
)
def test_durations_have_units(text, seconds):
    assert load({"cdc_max_age": text}).cdc_max_age == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("70000", 70000), ("96KB", 98304), ("1.5 mb", 1572864), ("1GB", 2**30)]
)
def test_sizes_have_units(text, size):
    assert load({"ring_bytes": text}).ring_bytes == size


def test_what_a_command_cannot_do_without_is_asked_for_by_name():
    settings = load({"slot": "s"})
    config.require(settings, "slot")
    with pytest.raises(SettingsError, match="--pub is missing; give it or set BRIDGE_PUB"):
        config.require(settings, "slot", "pub")


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().slot = "x"


def test_a_damaged_url_is_refused_without_showing_it():
    with pytest.raises(SettingsError, match="DATABASE_URL is not a connection string") as refused:
        conninfo_of(load({}, {"DATABASE_URL": f"nonsense {SECRET}"}))
    assert SECRET not in str(refused.value)
    for url in (
        f"postgresql://u:{SECRET}@h:abc/d", f"postgresql://u:{SECRET}/x@h/d",
        f"host=h port=70000 password={SECRET}", f"postgresql://u:{SECRET}@a:5432,b:0/d",
    ):  # fmt: skip
        with pytest.raises(
            SettingsError, match="DATABASE_URL: its port is not a number"
        ) as refused:
            conninfo_of(load({}, {"DATABASE_URL": url}))
        assert SECRET not in str(refused.value)
    for url in (
        "nats://h:notaport", "nats://", f"nats://u:{SECRET}@h:99999", "nats://h:0", " , ",
        "http://h:4222", f"foo://u:{SECRET}@h", f"nats://h,foo://{SECRET}#x@h",
    ):  # fmt: skip
        with pytest.raises(SettingsError, match="NATS_URL is not a NATS address") as refused:
            connection_options(load({}, {"NATS_URL": url}))
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("url", ["nats://h", "tls://h:4222", "ws://h:80", "wss://h", "h:4222", "h"])
def test_every_address_that_nats_knows_is_taken(url):
    assert connection_options(load({}, {"NATS_URL": url})).servers == (url,)


def test_several_hosts_of_postgresql_are_taken():
    url = "postgresql://u@a:5432,b/d"
    assert conninfo_to_dict(conninfo_of(load({}, {"DATABASE_URL": url})))["host"] == "a,b"


def test_a_complaint_names_where_the_value_came_from(tmp_path):
    with pytest.raises(SettingsError, match=r"\ANATS_CREDS: no file /nowhere"):
        load({}, {"NATS_CREDS": "/nowhere"})
    with pytest.raises(SettingsError, match=r"\ABRIDGE_SLOT: 'Upper' is not a slot name"):
        load({}, {"BRIDGE_SLOT": "Upper"})
    with pytest.raises(SettingsError, match=r"bridge\.toml: nats_ca: no file /nowhere"):
        load({}, {}, 'nats_ca = "/nowhere"', tmp_path)
    with pytest.raises(SettingsError, match=r"\ABRIDGE_NATS_URL is not a NATS address"):
        connection_options(load({}, {"BRIDGE_NATS_URL": "http://h"}))
    with pytest.raises(SettingsError, match=r"\ANATS_HOST is not the name of a host"):
        connection_options(load({}, {"NATS_HOST": "nats://h"}))


@pytest.mark.parametrize("item", config.definitions(), ids=lambda item: item.name)
def test_bytes_that_are_not_utf_8_are_refused(item):
    for flags, environ in (
        ({item.name: "\udcff"}, {}), ({}, {config.environment_names(item)[0]: "\udcff"}),
    ):  # fmt: skip
        with pytest.raises(SettingsError) as refused:
            load(flags, environ)
        assert str(refused.value).encode()


def test_variables_that_miss_a_setting_by_a_letter_are_named() -> None:
    environ = {"BRIDGE_PUBB": "p", "BRIDGE_REPLICA": "3", "BRIDGE_SLOT": "s", "BRIDGE_CONFIG": ""}
    others = {"BRIDGE_SERVICE_HOST": "10.0.0.1", "BRIDGE_PORT_9090_TCP_PORT": "1", "PUB": ""}
    assert config.misspelled({**environ, **others}) == [
        ("BRIDGE_PUBB", "BRIDGE_PUB"),
        ("BRIDGE_REPLICA", "BRIDGE_REPLICAS"),
    ]
