"""The runtime specification: what is asked for is in it, nothing hostile gets through, and it is plain JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import FormatError, WeenvError
from weenv.environment.spec import (
    CAPABILITIES,
    INIT,
    Bind,
    Limits,
    Options,
    added_process,
    build_spec,
    command,
    parse_bind,
    resources,
    restrict,
)
from weenv.environment.users import UnknownUser, User, resolve_user

PASSWD = b"root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001::/home/ann:/bin/sh\nodd:x:70:70\nbroken\n#no:x:1:1::/:\n"
GROUP = b"root:x:0:\nstaff:x:50:ann,bob\nann:x:1001:\nwheel:x:10:root,ann\n"
words = st.lists(st.text(min_size=1, max_size=8).filter(lambda t: "\0" not in t), max_size=4)


def spec(config: dict[str, object] | None = None, options: Options | None = None, user: User | None = None, **more: bool):
    return build_spec(
        {"config": {"Cmd": ["true"]} if config is None else config},
        options or Options(),
        user or User(),
        cgroup="/w/x",
        unified=more.get("unified", False),
    )


@given(entrypoint=words, cmd=words, args=words, override=st.none() | words)
def test_the_command_is_put_together_as_docker_does(
    entrypoint: list[str], cmd: list[str], args: list[str], override: list[str] | None
) -> None:
    found = command(
        {"Entrypoint": entrypoint, "Cmd": cmd},
        Options(args=tuple(args), entrypoint=None if override is None else tuple(override)),
    )
    if override is not None:
        assert found == override + args
    else:
        assert found == entrypoint + (args or cmd)


@given(
    env=st.dictionaries(st.text(min_size=1, max_size=6), st.text(max_size=6), max_size=4),
    cwd=st.text(max_size=8),
    args=words,
    uid=st.integers(0, 2**32 - 2),
    unified=st.booleans(),
)
def test_a_spec_is_json_or_an_error_that_says_why(
    env: dict[str, str], cwd: str, args: list[str], uid: int, unified: bool
) -> None:
    try:
        made = spec({}, Options(args=tuple(args), env=env, cwd=cwd), User(uid, 5), unified=unified)
    except WeenvError as error:
        assert error.message
        bad = any("=" in name or "\0" in name + value for name, value in env.items())
        assert not args or bad or (cwd and not cwd.startswith("/")) or "\0" in cwd
        return
    assert json.loads(json.dumps(made)) == made
    process = made["process"]
    assert process["args"] == args and process["user"] == {"uid": uid, "gid": 5}
    assert {f"{name}={value}" for name, value in env.items()} <= set(process["env"])
    assert len({item.partition("=")[0] for item in process["env"]}) == len(process["env"]), "each variable once"
    assert process["cwd"].startswith("/")
    assert ("effective" in process["capabilities"]) == (uid == 0)
    assert any(mount["type"] == "cgroup" for mount in made["mounts"]) == unified


def test_defaults_keep_the_machine_out_of_reach() -> None:
    made = spec()
    assert {item["type"] for item in made["linux"]["namespaces"]} == {"pid", "ipc", "uts", "mount", "network"}
    assert made["linux"]["resources"]["devices"] == [{"allow": False, "access": "rwm"}]
    assert {"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_NET_ADMIN", "CAP_SYS_MODULE"}.isdisjoint(CAPABILITIES)
    assert "/proc/kcore" in made["linux"]["maskedPaths"] and "/proc/sys" in made["linux"]["readonlyPaths"]
    assert "/proc/sysrq-trigger" in made["linux"]["readonlyPaths"]
    assert not any(mount["type"] == "bind" for mount in made["mounts"])
    sys_mount = next(mount for mount in made["mounts"] if mount["destination"] == "/sys")
    assert "ro" in sys_mount["options"]
    host = spec(options=Options(network="host"))
    assert {"type": "network"} not in host["linux"]["namespaces"]
    with pytest.raises(FormatError):
        spec(options=Options(network="bridge"))


def test_limits_are_in_the_kernels_units() -> None:
    assert resources(Limits()) == {}
    made = resources(Limits(1.5, 1 << 30, 100, swap=True))
    assert made == {
        "cpu": {"quota": 150_000, "period": 100_000, "shares": 1536},
        "memory": {"limit": 1 << 30, "swap": 1 << 30},
        "pids": {"limit": 100},
    }
    assert "swap" not in resources(Limits(memory=5))["memory"]
    assert resources(Limits(0.0001))["cpu"]["quota"] == 1000, "less than a millisecond the kernel refuses"


@pytest.mark.parametrize("text", ["", "x", "a:/b", "/a:b", "/a", "/a:/b:rx", "/a:/b/../c", "/a:/", "/a\0:/b", "/a:/b:ro:ro"])
def test_binds_that_are_none(text: str) -> None:
    with pytest.raises(FormatError):
        parse_bind(text)


def test_binds() -> None:
    assert parse_bind("/a//b/:/c/:ro") == Bind("/a/b", "/c", True)
    made = spec(options=Options(binds=(Bind("/a", "/b"), Bind("/c", "/d", True)), init="/i"))
    binds = [mount for mount in made["mounts"] if mount["type"] == "bind"]
    assert [(m["source"], m["destination"], m["options"][-1]) for m in binds] == [
        ("/i", INIT, "ro"), ("/a", "/b", "rw"), ("/c", "/d", "ro"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ("", User(0, 0, (0, 10), "/root")),
        ("root", User(0, 0, (0, 10), "/root")),
        ("ann", User(1000, 1001, (10, 50, 1001), "/home/ann")),
        ("1000", User(1000, 1001, (10, 50, 1001), "/home/ann")),
        ("ann:staff", User(1000, 50, (), "/home/ann")),
        ("ann:7", User(1000, 7, (), "/home/ann")),
        ("odd", User(70, 70, (70,), "/")),
        ("4242", User(4242, 0, (0,), "/")),
        ("4242:4243", User(4242, 4243, (), "/")),
    ],
)
def test_users(text: str, user: User) -> None:
    assert resolve_user(text, PASSWD, GROUP) == user


def test_users_that_are_none() -> None:
    for text in ("bob", "ann:nothing", "#no", "99999999999", "-1"):
        with pytest.raises(UnknownUser):
            resolve_user(text, PASSWD, GROUP)
    assert resolve_user("", b"", b"") == User(0, 0, (0,), "/root")


@given(passwd=st.binary(max_size=200), group=st.binary(max_size=200), text=st.text(max_size=12))
def test_hostile_account_files_give_ids_or_an_error(passwd: bytes, group: bytes, text: str) -> None:
    try:
        found = resolve_user(text, passwd, group)
    except UnknownUser:
        return
    assert 0 <= found.uid < 2**32 - 1 and 0 <= found.gid < 2**32 - 1 and found.home.startswith("/")


def test_an_added_process_is_the_first_ones_sibling() -> None:
    base = spec({"Cmd": ["x"], "Env": ["A=1", "B=2"], "WorkingDir": "/w"})["process"]
    made = added_process(base, ("ls", "-l"), env={"B": "3"})
    assert made["args"] == ["ls", "-l"] and made["cwd"] == "/w"
    assert {"A=1", "B=3"} <= set(made["env"]) and "B=2" not in made["env"]
    other = added_process(base, ("id",), env={}, user=User(1000, 1, (2,), "/home/a"), cwd="/")
    assert other["user"] == {"uid": 1000, "gid": 1, "additionalGids": [2]} and "HOME=/home/a" in other["env"]
    assert "effective" not in other["capabilities"]
    for args, env, cwd in (
        ((), {}, ""), (("a\0",), {}, ""), (("a",), {"x=y": ""}, ""), (("a",), {}, "rel"), (("a\udcff",), {}, ""),
        (("a",), {"X": "\udcff"}, ""), (("a",), {"\udcff": ""}, ""), (("a",), {}, "/\ud800"),
    ):  # fmt: skip
        with pytest.raises(FormatError):
            added_process(base, args, env=env, cwd=cwd)


def test_a_negative_oom_score_needs_the_privilege() -> None:
    assert restrict(-500, own=0, privileged=False) == 0
    assert restrict(-500, own=0, privileged=True) == -500
    assert restrict(300, own=0, privileged=False) == 300
    assert restrict(None, own=0, privileged=False) is None
