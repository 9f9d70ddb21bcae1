"""The certificate of a manager: the site's, or one that it makes for itself and that clients pin by fingerprint.

A generated one proves nothing by who signed it. Clients compare the SHA-256 of the whole certificate with the one that
`ff up`, or the operator, told them; so a name in it need not match, and nobody in between can offer another one.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import os
import ssl
from collections.abc import Sequence
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fireflyer.base.errors import UsageError
from fireflyer.identity.private_files import lock_file, write_private_file

__all__ = ["Certificate", "certificate_of"]

_log = logging.getLogger(__name__)
_DAYS: Final = 3650


class Certificate(NamedTuple):
    certificate_file: str
    key_file: str
    fingerprint: str
    """SHA-256 of the certificate's DER encoding, hexadecimal."""


def certificate_of(directory: str, hosts: Sequence[str], certificate_file: str = "", key_file: str = "") -> Certificate:
    """The site's where it is given, else that in `directory`, which is made once, for the names and addresses `hosts`,
    and made again when it has expired or the files are damaged. Raises `UsageError` for files of the site that are no
    certificate and key."""
    if bool(certificate_file) != bool(key_file):
        raise UsageError("a certificate needs its key: give both tls_certificate and tls_key")
    if certificate_file:
        given = _checked(certificate_file, key_file)
        _log_end(given, certificate_file)
        return Certificate(certificate_file, key_file, _fingerprint(given))
    certificate_file, key_file = os.path.join(directory, "tls.crt"), os.path.join(directory, "tls.key")
    with lock_file(f"{key_file}.lock"):
        found = _kept(certificate_file, key_file)
        if found is None:
            key, certificate = _generated(hosts)
            write_private_file(key_file, key)
            write_private_file(certificate_file, certificate)
            found = _checked(certificate_file, key_file)
    return Certificate(certificate_file, key_file, _fingerprint(found))


def _kept(certificate_file: str, key_file: str) -> x509.Certificate | None:
    """The one that was generated; None where another one is to be made."""
    if not os.path.exists(certificate_file):
        return None
    try:
        found = _checked(certificate_file, key_file)
    except UsageError as error:
        reason = str(error)
    else:
        if _now() < found.not_valid_after_utc:
            return found
        reason = f"{certificate_file} has expired"
    _log.warning("the certificate is made again, so users log in again with its fingerprint reason=%s", reason)
    return None


def _checked(certificate_file: str, key_file: str) -> x509.Certificate:
    """The first certificate in the file, with whose key. Raises `UsageError`."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate_file, key_file)
        with open(certificate_file, "rb") as file:
            return x509.load_pem_x509_certificate(file.read(1 << 20))
    except (OSError, ssl.SSLError, ValueError) as error:
        raise UsageError(f"{certificate_file} and {key_file} are not a certificate and its key: {error}") from None


def _log_end(certificate: x509.Certificate, path: str) -> None:
    """Of a certificate of the site, which is not ours to renew."""
    if _now() >= certificate.not_valid_after_utc:
        _log.error("the certificate has expired, so clients refuse it; renew it and start again path=%s", path)


def _fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _generated(hosts: Sequence[str]) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fireflyer platform")])
    now = _now()
    names = [_general_name(host) for host in dict.fromkeys(host.strip("[]") for host in hosts if host)]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName(names or [x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
