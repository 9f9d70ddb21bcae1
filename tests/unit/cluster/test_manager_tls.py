"""The certificate of a manager, and how clients check it."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
import ssl
import stat
import threading
from pathlib import Path
from typing import Self

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from tests.support.platform.certificates import Authority

from fireflyer.base.errors import FireflyerError, PermissionDenied, Unreachable, UsageError
from fireflyer.cluster.client import Client, Connection
from fireflyer.cluster.manager.web import tls
from fireflyer.cluster.manager.web.tls import Certificate, certificate_of

HOSTS = ("10.88.0.1", "head-1", "")


def names_of(made: Certificate) -> tuple[list[str], list[str]]:
    found = x509.load_pem_x509_certificate(Path(made.certificate_file).read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName), [str(one) for one in names.get_values_for_type(x509.IPAddress)]


def test_a_certificate_is_made_once_for_all_names_and_nobody_else_reads_its_files(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        made = certificate_of(str(tmp_path), HOSTS)
    finally:
        os.umask(mask)
    assert names_of(made) == (["head-1"], ["10.88.0.1"])
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert files == {"tls.crt": 0o600, "tls.key": 0o600, "tls.key.lock": 0o600}
    assert certificate_of(str(tmp_path), HOSTS) == made
    assert certificate_of(str(tmp_path), ("another",)) == made, "what users have pinned stays"
    assert len(made.fingerprint) == 64


@pytest.mark.parametrize(("host", "names"), [("[fd00::1]", ([], ["fd00::1"])), ("", (["localhost"], []))])
def test_names_of_other_kinds(tmp_path: Path, host: str, names: tuple[list[str], list[str]]) -> None:
    assert names_of(certificate_of(str(tmp_path), (host, host))) == names


def test_it_is_made_again_when_it_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_now", lambda: datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3651))
    old = certificate_of(str(tmp_path), HOSTS)
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING):
        new = certificate_of(str(tmp_path), HOSTS)
    assert new.fingerprint != old.fingerprint
    assert "has expired" in caplog.text
    assert certificate_of(str(tmp_path), HOSTS) == new


@pytest.mark.parametrize("damage", ["other key", "no key", "cut key", "cut certificate", "no certificate"])
def test_it_is_made_again_when_it_does_not_belong_to_its_key(tmp_path: Path, damage: str) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    old = certificate_of(str(here), HOSTS)
    kind, _, which = damage.partition(" ")
    path = here / ("tls.key" if which == "key" else "tls.crt")
    if kind == "other":
        path.write_bytes(Path(certificate_of(str(other), HOSTS).key_file).read_bytes())
    elif kind == "no":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:60])
    new = certificate_of(str(here), HOSTS)
    assert new.fingerprint != old.fingerprint
    assert certificate_of(str(here), HOSTS) == new


def test_a_certificate_of_the_site_is_used_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority()
    certificate, key = authority.issue(tmp_path, "head-1")
    made = certificate_of(str(tmp_path), HOSTS, str(certificate), str(key))
    assert (made.certificate_file, made.key_file) == (str(certificate), str(key))
    assert not (tmp_path / "tls.crt").exists()
    assert not caplog.text
    expired, key = authority.issue(tmp_path, "head-2", days=-1)
    certificate_of(str(tmp_path), HOSTS, str(expired), str(key))
    assert "has expired" in caplog.text


def test_files_of_the_site_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    authority = Authority()
    certificate, _ = authority.issue(tmp_path, "head-1")
    _, other = authority.issue(tmp_path, "head-2")
    for key in (str(other), str(tmp_path / "none"), str(certificate)):
        with pytest.raises(UsageError, match="are not a certificate and its key"):
            certificate_of(str(tmp_path), HOSTS, str(certificate), key)
    with pytest.raises(UsageError, match="give both"):
        certificate_of(str(tmp_path), HOSTS, str(certificate))


@pytest.mark.parametrize("fingerprint", ["3f1c", "é" * 64, "g" * 64, "0" * 65])
def test_what_is_no_fingerprint_is_refused_before_anything_is_sent(fingerprint: str) -> None:
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        Client(Connection(url="https://10.0.0.1:9440", token="t", fingerprint=fingerprint))


class Listener:
    """Takes connections over TLS, and keeps what clients send."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._socket.getsockname()[1]}"
        self.heard = b""
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with (
            connection,
            contextlib.suppress(OSError),
            self._context.wrap_socket(connection, server_side=True) as secure,
        ):
            self.heard = secure.recv(65536)


def asks(made: tuple[Path, Path], fingerprint: str) -> tuple[FireflyerError, bytes]:
    """How a client ends, and what was sent."""
    with Listener(*made) as listener:
        connection = Connection(url=listener.url, token="secret", fingerprint=fingerprint)
        with Client(connection) as client, pytest.raises(FireflyerError) as raised:
            client.whoami()
    return raised.value, listener.heard


def fingerprint_of(certificate: Path) -> str:
    return x509.load_pem_x509_certificate(certificate.read_bytes()).fingerprint(hashes.SHA256()).hex()


def test_a_token_is_sent_to_the_manager_with_the_pinned_certificate_alone(tmp_path: Path) -> None:
    authority = Authority()
    made, other = authority.issue(tmp_path, "head-1"), authority.issue(tmp_path, "head-2")
    pinned = fingerprint_of(made[0])
    error, heard = asks(made, pinned.upper())
    assert isinstance(error, Unreachable), error
    assert b"Bearer secret" in heard
    error, heard = asks(other, pinned)
    assert isinstance(error, PermissionDenied)
    assert "another certificate" in str(error)
    assert heard == b""


@pytest.mark.parametrize(
    ("host", "trusted", "why"),
    [
        ("127.0.0.1", True, ""),
        ("127.0.0.1", False, "unable to get local issuer certificate; log in with the fingerprint"),
        ("head-1", True, "is not valid for '127.0.0.1'; use a name that the certificate has"),
    ],
)
def test_without_a_fingerprint_the_signature_and_the_name_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, trusted: bool, why: str
) -> None:
    authority, trusts = Authority(), tmp_path / "trusted.pem"
    made = authority.issue(tmp_path, host)
    (authority if trusted else Authority()).save(trusts)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusts))
    error, heard = asks(made, "")
    assert (b"Bearer secret" in heard) == (not why)
    if why:
        assert isinstance(error, PermissionDenied)
        assert why in str(error)
