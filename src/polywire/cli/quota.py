"""``polywire quota``: limit the bytes and requests per second of users and client ids, while the broker runs.

The commands use the admin API over HTTP. ``polywire serve --quotas`` sets quotas in the configuration.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from polywire.broker.client_quotas import parse_rate
from polywire.cli.admin import AdminApi, HttpAddress
from polywire.cli.output import Failed, ListFormat, note, print_list
from polywire.cli.usage import examples
from polywire.escaping import escaped

app = App(
    name="quota",
    help_epilogue=examples(
        "polywire quota set --user alice --produce 1MB --fetch 5MB",
        "polywire quota list",
    ),
)
LIMITS: Final = ("produce", "fetch", "requests")
COLUMNS: Final = ("user", "client_id", *LIMITS, "defined_in")
NO_LIMIT: Final = "off"

User = Annotated[str | None, Parameter(help="Name of the user. * stands for every user without a quota of its own.")]
ClientId = Annotated[
    str | None,
    Parameter(help="Client id, as sent by Kafka clients. * stands for every client id without a quota of its own."),
]


@app.command(
    name="set",
    help_epilogue=examples(
        "polywire quota set --user alice --produce 1MB --fetch 5MB",
        "polywire quota set --client-id etl --requests 100",
        "polywire quota set --user '*' --fetch off",
    ),
)
def set_quota(
    *,
    user: User = None,
    client_id: ClientId = None,
    produce: str | None = None,
    fetch: str | None = None,
    requests: str | None = None,
    http: HttpAddress = None,
) -> None:
    """Change the limits of a user, of a client id, or of a user with a client id. It applies at once.

    Limits that are not named keep their values. Every process of a broker enforces quotas for its own connections.

    Parameters
    ----------
    produce
        Bytes that clients may send per second, such as 500kB, 1MB or 10MiB; off for no limit.
    fetch
        Bytes that clients may receive per second; off for no limit.
    requests
        Requests per second; off for no limit.
    """
    given = {"produce": produce, "fetch": fetch, "requests": requests}
    limits = {name: _rate(text) for name, text in given.items() if text is not None}
    if not limits:
        raise Failed("name a limit: --produce, --fetch or --requests")
    found = AdminApi(http).request("POST", "quotas", {**_entity(user, client_id), **limits})
    note(f"set {_entity_text(found)} {' '.join(f'{name}={_shown(found[name]) or NO_LIMIT}' for name in LIMITS)}")


@app.command(name="list", help_epilogue=examples("polywire quota list", "polywire quota list --output json"))
def list_quotas(
    *,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
    http: HttpAddress = None,
) -> None:
    """List quotas: bytes and requests per second, and whether they are from the configuration or were set at run time."""
    found = AdminApi(http).get(["quotas"])["quotas"]
    rows = [
        {
            **{name: quota[name] for name in ("user", "client_id")},
            **{name: _shown(quota[name]) for name in LIMITS},
            "defined_in": "configuration" if quota["configured"] else "broker",
        }
        for quota in found["quotas"]
    ]
    print_list(rows, columns=COLUMNS, form=output)


@app.command(help_epilogue=examples("polywire quota remove --user alice", "polywire quota remove --client-id '*'"))
def remove(*, user: User = None, client_id: ClientId = None, http: HttpAddress = None) -> None:
    """Remove the quota that was set at run time. A quota of the configuration applies again."""
    found = AdminApi(http).request("DELETE", "quotas", _entity(user, client_id))
    if not found.get("removed", True):
        raise Failed(f"no quota was set at run time (see polywire quota list) {_entity_text(found)}")
    note(f"removed {_entity_text(found)}")


def _entity(user: str | None, client_id: str | None) -> dict[str, str]:
    names = {"user": user, "client_id": client_id}
    found = {name: value for name, value in names.items() if value is not None}
    if not found:
        raise Failed("name a user or a client id: --user or --client-id")
    return found


def _entity_text(found: Any) -> str:
    return " ".join(f"{name}={escaped(found[name])}" for name in ("user", "client_id") if found[name] is not None)


def _rate(text: str) -> float | None:
    return None if text == NO_LIMIT else parse_rate(text)


def _shown(rate: float | None) -> float | int | None:
    return int(rate) if rate is not None and rate.is_integer() else rate
