"""The certificate of a manager: the site's, or one that it makes for itself and that clients pin by fingerprint.

A generated one proves nothing by who signed it. Clients compare the SHA-256 of the whole certificate with the one that
`ff up`, or the operator, told them; so a name in it need not match, and nobody in between can offer another one.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.identity.private_files import lock_file, write_private_file

__all__ = ["Certificate", "certificate_of"]

_DAYS: Final = 3650


class Certificate(NamedTuple):
    certificate_file: str
    key_file: str
    fingerprint: str
    """SHA-256 of the certificate's DER encoding, hexadecimal."""


def certificate_of(directory: str, host: str, certificate_file: str = "", key_file: str = "") -> Certificate:
    """The site's where it is given, else that in `directory`, which is made once. Raises `UsageError` for files that
    are no certificate and key, `DataCorruption` where the generated ones are damaged."""
    if bool(certificate_file) != bool(key_file):
        raise UsageError("a certificate needs its key: give both tls_certificate and tls_key")
    if certificate_file:
        return Certificate(certificate_file, key_file, _checked(certificate_file, key_file, UsageError))
    certificate_file, key_file = os.path.join(directory, "tls.crt"), os.path.join(directory, "tls.key")
    with lock_file(f"{key_file}.lock"):
        if not os.path.exists(certificate_file):
            key, certificate = _generated(host)
            write_private_file(key_file, key)
            write_private_file(certificate_file, certificate)
    return Certificate(certificate_file, key_file, _checked(certificate_file, key_file, DataCorruption))


def _checked(certificate_file: str, key_file: str, kind: type[UsageError | DataCorruption]) -> str:
    """The fingerprint of the first certificate in the file."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate_file, key_file)
        with open(certificate_file, "rb") as file:
            certificate = x509.load_pem_x509_certificate(file.read(1 << 20))
    except (OSError, ssl.SSLError, ValueError) as error:
        raise kind(f"{certificate_file} and {key_file} are not a certificate and its key: {error}") from None
    return certificate.fingerprint(hashes.SHA256()).hex()


def _generated(host: str) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fireflyer platform")])
    now = datetime.datetime.now(datetime.UTC)
    alternative: x509.GeneralName
    try:
        alternative = x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        alternative = x509.DNSName(host or "localhost")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)
