"""Contexts: the file, precedence, and passwords that are sent only to the context's broker."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polywire.cli import contexts
from polywire.cli.contexts import Context, Contexts, apply, contexts_file, load, save, without_option
from polywire.cli.main import run
from polywire.cli.output import Failed
from polywire.cli.usage import EXIT_DONE, EXIT_FAILED
from polywire.errors import Invalid

VARIABLES = ("POLYWIRE_ADDRESS", "POLYWIRE_HTTP", "POLYWIRE_PASSWORD", "POLYWIRE_CONTEXT", "SSL_CERT_FILE")
PROD = "polywire+tls://alice@prod:9955"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty directory for configuration, and restore the environment that commands change."""
    before = dict(os.environ)
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


def secret_file(path: Path, text: str = "from-file\n", mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def with_contexts(current: str = "prod", /, **more: Context) -> None:
    lab = Context("kafka://lab:9094", http="http://lab:1", password="clear", user="bob")
    prod = Context("polywire+tls://prod:9955", user="alice", password_command="echo from-command")
    save(Contexts({"lab": lab, "prod": prod, **more}, current))


def used() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in VARIABLES[:3])


def test_the_current_context_is_used() -> None:
    with_contexts()
    apply(None, ["topic", "list"])
    assert used() == (PROD, None, "from-command")


def test_the_environment_overrides_the_current_context_and_an_option_overrides_both() -> None:
    with_contexts()
    os.environ["POLYWIRE_CONTEXT"] = "lab"
    apply(None, ["topic", "list"])
    assert used() == ("kafka://bob@lab:9094", "http://bob@lab:1", "clear")
    apply("prod", ["topic", "list"])
    assert used() == (PROD, None, "from-command"), "nothing of the environment's broker remains"


def test_an_address_in_the_environment_overrides_contexts_that_no_option_chose() -> None:
    with_contexts()
    os.environ["POLYWIRE_ADDRESS"] = "flux://other:9092"
    os.environ["POLYWIRE_CONTEXT"] = "lab"
    apply(None, ["topic", "list"])
    assert used() == ("flux://other:9092", None, None)
    apply("lab", ["topic", "list"])
    assert used() == ("kafka://bob@lab:9094", "http://bob@lab:1", "clear")


def test_single_variables_of_the_environment_override_the_context() -> None:
    with_contexts("lab")
    os.environ["POLYWIRE_PASSWORD"] = "mine"
    os.environ["POLYWIRE_HTTP"] = "http://mine:1"
    apply(None, ["topic", "list"])
    assert used() == ("kafka://bob@lab:9094", "http://mine:1", "mine")


def test_a_context_without_a_password_uses_that_of_the_environment() -> None:
    with_contexts(prod=Context("kafka://x:1", user="eve"))
    os.environ["POLYWIRE_PASSWORD"] = "mine"
    apply("prod", ["topic", "list"])
    assert used() == ("kafka://eve@x:1", None, "mine")
    os.environ["POLYWIRE_ADDRESS"] = "kafka://other:1"
    apply("prod", ["topic", "list"])
    assert used() == ("kafka://eve@x:1", None, None), "the password is for the other broker"


@pytest.mark.parametrize(
    "words",
    [["--address", "kafka://a@x:1"], ["--address=kafka://a@x:1"], ["-a", "kafka://a@x:1"], ["--http", "http://a@x:1"]],
)
def test_a_password_is_not_sent_to_another_broker(words: list[str]) -> None:
    with_contexts()
    apply("prod", ["topic", "list", *words])
    assert os.environ.get("POLYWIRE_PASSWORD") is None


def test_an_empty_name_uses_no_context() -> None:
    with_contexts()
    os.environ["POLYWIRE_CONTEXT"] = ""
    apply(None, ["topic", "list"])
    assert used() == (None, None, None)


def test_help_and_commands_without_a_broker_read_no_context(capsys: pytest.CaptureFixture[str]) -> None:
    with_contexts("broken", broken=Context("kafka://x:1", user="a", password_command="false"))
    assert run(["topic", "list", "--help"]) == EXIT_DONE
    assert run(["config", "show"]) == EXIT_DONE
    assert run(["--context", "prod", "config", "show"]) == EXIT_FAILED
    assert "only commands that connect to a broker use a context" in capsys.readouterr().err
    assert run(["topic", "list"]) == EXIT_FAILED
    assert "command for the password failed exit=1 command='false'" in capsys.readouterr().err


def test_a_password_file(home: Path) -> None:
    path = secret_file(home / "secret")
    with_contexts(file=Context("kafka://x:1", user="a", password_file=str(path)))
    apply("file", [])
    assert used() == ("kafka://a@x:1", None, "from-file")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: secret_file(path, mode=0o640), "run chmod 600"),
        (lambda path: secret_file(path, ""), "password is empty"),
        (lambda path: secret_file(path, "x" * 5000), "file is too large"),
        (lambda path: path.mkdir() or path, "Is a directory"),
        (lambda path: path, "does not exist"),
    ],
)
def test_an_unusable_password_file_is_an_error(home: Path, make: Callable[[Path], Path], message: str) -> None:
    path = make(home / "secret")
    with_contexts(file=Context("kafka://x:1", user="a", password_file=str(path)))
    with pytest.raises((Failed, OSError), match=message):
        apply("file", [])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-command", "reason="),
        ("false", "exit=1"),
        ("true", "password is empty"),
        ("'", "reason='No closing quotation'"),
        ("sleep 60", "takes too long"),
    ],
)
def test_a_failing_password_command_is_an_error(command: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "COMMAND_S", 0.2)
    with_contexts(command=Context("kafka://x:1", user="a", password_command=command))
    with pytest.raises(Failed, match=message):
        apply("command", [])


def test_a_tls_authority_is_trusted(home: Path) -> None:
    with_contexts(tls=Context("kafka+tls://x:1", tls_authority=str(home / "ca.pem")))
    apply("tls", [])
    assert os.environ["SSL_CERT_FILE"] == str(home / "ca.pem")
    os.environ["SSL_CERT_FILE"] = "/company.pem"
    apply("tls", ["topic", "list"])
    assert os.environ["SSL_CERT_FILE"] == str(home / "ca.pem")


def test_the_file_is_private_and_complete() -> None:
    odd = Context("kafka://x:1", user='a"\\\n\x7fü', password="p'\t#", tls_authority="/ü")
    with_contexts("prod", **{"odd.name": odd})
    assert stat.S_IMODE(contexts_file().stat().st_mode) == 0o600
    assert load().by_name["odd.name"] == odd
    contexts_file().chmod(0o604)
    with pytest.raises(Failed, match="run chmod 600"):
        load()


@pytest.mark.parametrize(
    "text",
    [
        "current = 5",
        "current = 'none'",
        "other = 5",
        "[contexts.a]\nuser = 'x'",
        "[contexts.a]\naddress = 5",
        "[contexts.a]\naddress = 'x'\nadress = 'y'",
        "[contexts.'a b']\naddress = 'x'",
        "[[contexts]]",
        "contexts = {a = 5}",
        "{",
    ],
)
def test_an_invalid_file_is_an_error(text: str) -> None:
    with_contexts()
    contexts_file().write_text(text)
    with pytest.raises(Failed, match="file of contexts is invalid"):
        load()


def test_the_option_may_be_anywhere_before_the_end_of_options() -> None:
    assert without_option(["--context", "a", "topic", "list"]) == (["topic", "list"], "a")
    assert without_option(["topic", "list", "--context=a"]) == (["topic", "list"], "a")
    assert without_option(["topic", "--", "--context", "a"]) == (["topic", "--", "--context", "a"], None)
    with pytest.raises(Failed, match="needs the name"):
        without_option(["topic", "--context"])


def test_an_unknown_context_is_an_error_with_the_known_ones() -> None:
    with_contexts()
    with pytest.raises(Invalid, match=r"did you mean 'prod'\? context='prd' known=lab,prod"):
        apply("prd", [])


def test_the_commands(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    path = secret_file(home / "secret")
    new = [
        "context",
        "add",
        "prod",
        "--address",
        "polywire://prod:9555",
        "--user",
        "alice",
        "--password-file",
        str(path),
    ]
    assert run(new) == EXIT_DONE
    assert run(new) == EXIT_FAILED
    assert "context exists (use --replace)" in capsys.readouterr().err
    assert run([*new, "--replace"]) == EXIT_DONE
    assert run(["context", "add", "lab", "-a", "kafka://bob:se%40cret@lab:9094"]) == EXIT_DONE
    assert load().by_name["lab"] == Context("kafka://lab:9094", user="bob", password="se@cret")
    assert load().current == "prod", "the first context is the current one"
    assert run(["context", "use", "lab"]) == EXIT_DONE
    capsys.readouterr()
    assert run(["context", "list", "--output", "json"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "se@cret" not in text
    assert [(row["context"], row["current"], row["password"]) for row in json.loads(text)] == [
        ("lab", True, "context"),
        ("prod", False, f"file {path}"),
    ]
    assert run(["context", "show", "--output", "json"]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)[0]["context"] == "lab"
    assert run(["context", "delete", "lab"]) == EXIT_DONE
    assert load() == Contexts({"prod": Context("polywire://prod:9555", user="alice", password_file=str(path))})
    assert run(["context", "show"]) == EXIT_FAILED
    assert "no context is used" in capsys.readouterr().err


def test_files_are_found_from_any_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    secret_file(home / "pw")
    assert run(["context", "add", "a", "-a", "kafka://x:1", "--user", "al", "--password-file", "pw"]) == EXIT_DONE
    assert load().by_name["a"].password_file == str(home / "pw")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "-a", "kafka://x:1", "--tls-authority", "none.pem"), "file does not exist"),
        (("a b", "-a", "kafka://x:1"), "context name is invalid"),
        (("a", "-a", "kafka://bob@x:1", "--user", "alice"), "one user found=alice,bob"),
        (("a", "-a", "kafka://x:1", "--password-command", "x"), "needs a user"),
        (("a", "-a", "kafka://x:1", "--password-command", "x", "--password-file", "y"), "only one of"),
        (("a", "-a", "kafka://x:1,y"), "address is not host:port"),
    ],
)
def test_invalid_contexts_are_not_stored(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["context", "add", *words]) == EXIT_FAILED
    assert message in capsys.readouterr().err
    assert not contexts_file().exists()
