"""A certificate authority for one sandbox, by which the proxy reads requests to the hosts that get a credential.

Invariants:
- Its key and the servers' keys live in this process's memory alone. The sandbox gets the certificate.
- Its certificate is good for the hosts with a credential and for no other name (name constraints), and for some days.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Iterable

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAYS = 7  # longer than any sandbox lives
_PEM = serialization.Encoding.PEM


class Authority:
    def __init__(self, hosts: Iterable[str]) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: dict[str, ssl.SSLContext] = {}
        names = [x509.DNSName(host) for host in sorted(set(hosts))]
        self._certificate = (
            _builder("Sandbox egress proxy", "Sandbox egress proxy", self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.NameConstraints(permitted_subtrees=names, excluded_subtrees=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate(self) -> bytes:
        """The certificate as PEM."""
        return self._certificate.public_bytes(_PEM)

    def server(self, host: str) -> ssl.SSLContext:
        """Return the TLS settings of a server that claims to be `host`."""
        if host not in self._contexts:
            self._contexts[host] = _context(self._leaf(host).public_bytes(_PEM), self._leaf_key)
        return self._contexts[host]

    def _leaf(self, host: str) -> x509.Certificate:
        # A common name has 64 characters at most; clients read the alternative name.
        return (
            _builder(host[:64], "Sandbox egress proxy", self._leaf_key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,  # Python 3.13 asks for it
            )
            .sign(self._key, hashes.SHA256())
        )


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _context(certificate: bytes, key: ec.EllipticCurvePrivateKey) -> ssl.SSLContext:
    private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    # `ssl` reads keys from paths alone. A file without a name never lies on a disk.
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(file, certificate + private)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
