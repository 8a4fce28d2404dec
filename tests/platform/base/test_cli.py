from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from loraplex.platform.api_keys.principal import Principal, Scope
from loraplex.platform.cli import db, key, tenant, version
from loraplex.platform.installation import open_installation
from tests.platform.helpers import create_settings

Run = Callable[..., tuple[int, str, str]]
"""Arguments -> exit status, standard output, standard error."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    app = typer.Typer()
    for module in (tenant, key, db, version):
        app.add_typer(module.app)

    def invoke(*arguments: str) -> tuple[int, str, str]:
        place = [] if arguments[0] == "version" else ["--data-dir", str(tmp_path)]
        result = CliRunner().invoke(app, [*arguments, *place])
        return result.exit_code, result.stdout.strip(), result.stderr.strip()

    return invoke


def holder(data_dir: Path, secret: str) -> Principal:
    async def authenticate() -> Principal:
        async with open_installation(create_settings(data_dir)) as installation:
            return await installation.api_keys.authenticate(secret)

    return asyncio.run(authenticate())


def test_a_tenant_is_made_listed_and_marked_for_deletion(run: Run) -> None:
    code, tenant_id, _ = run("tenant", "create", "acme")
    assert (code, tenant_id.startswith("ten_")) == (0, True)
    assert run("tenant", "list")[1].split("\t")[:2] == ["acme", "active"]
    assert run("tenant", "delete", "acme", "--confirm", "acme")[0] == 0
    assert run("tenant", "list")[1].split("\t")[:2] == ["acme", "deleting"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tenant", "create", "Bad Name"], "cannot name a tenant"),
        (["tenant", "delete", "acme", "--confirm", "other"], "the tenant's name is 'acme'"),
        (["tenant", "delete", "nobody", "--confirm", "nobody"], "no such tenant"),
        (["key", "create", "--tenant", "nobody", "--scopes", "infer"], "no such tenant"),
        (["key", "create", "--tenant", "acme", "--scopes", "platform:admin"], "never holds platform:admin"),
        (["key", "revoke", "key_unknown"], "no such key"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_1(run: Run, arguments: list[str], message: str) -> None:
    run("tenant", "create", "acme")
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["key", "create"],
        ["key", "create", "--scopes", "root"],
        ["key", "create", "--platform-admin", "--scopes", "infer"],
        ["key", "create", "--platform-admin", "--tenant", "acme"],
        ["tenant", "delete", "acme"],
    ],
)
def test_wrong_usage_is_status_2(run: Run, arguments: list[str]) -> None:
    assert run(*arguments)[0] == 2


def test_a_lost_admin_key_is_replaced_on_the_host(run: Run, tmp_path: Path) -> None:
    code, secret, _ = run("key", "create", "--platform-admin")
    assert code == 0
    assert holder(tmp_path, secret).is_platform_admin


def test_a_tenants_key_is_made_listed_and_revoked(run: Run, tmp_path: Path) -> None:
    run("tenant", "create", "acme")
    code, secret, _ = run("key", "create", "--tenant", "acme", "--scopes", "infer, adapters:read", "--name", "ci")
    assert code == 0
    principal = holder(tmp_path, secret)
    assert principal.tenant is not None
    assert principal.tenant.name == "acme"
    assert principal.scopes == {Scope.INFER, Scope.ADAPTERS_READ}
    columns = run("key", "list", "--tenant", "acme")[1].split("\t")
    assert columns == [principal.key_id, secret[:12], "active", "adapters:read,infer", "ci"]
    assert run("key", "list")[1] == ""
    assert run("key", "revoke", principal.key_id)[0] == 1  # a platform key of that id there is not
    assert run("key", "revoke", principal.key_id, "--tenant", "acme")[0] == 0
    assert run("key", "list", "--tenant", "acme")[1].split("\t")[2] == "revoked"


def test_db_upgrade_tells_where_and_what(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        code, out, _ = run("db", "upgrade")
        assert (code, str(tmp_path / "loraplex.db") in out, out.endswith("0001")) == (0, True, True)


def test_another_secret_is_refused_on_the_host_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("db", "upgrade")
    monkeypatch.setenv("LORAPLEX_SECRET_KEY", "another secret of at least 32 characters")
    code, _, err = run("key", "create", "--platform-admin")
    assert (code, "not the one this database was made with" in err) == (1, True)


def test_version_names_what_decides_the_answers(run: Run) -> None:
    code, out, _ = run("version")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["loraplex", "python", "torch", "transformers"]


@pytest.mark.parametrize("command", [["tenant"], ["key", "create"], ["db", "upgrade"]])
def test_help_says_what_a_command_does(run: Run, command: list[str]) -> None:
    app = typer.Typer()
    for module in (tenant, key, db):
        app.add_typer(module.app)
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "LORAPLEX_DATA_DIR" in result.stdout or command == ["tenant"]
