"""HTTPS: the server's certificate, and which clients' are taken. Files are checked before anything starts."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from app.settings import InvalidSettings, Settings

MAX_PASSWORD_BYTES = 1024
MISMATCH = "KEY_VALUES_MISMATCH"  # OpenSSL's name of it


@dataclass(frozen=True)
class TlsFiles:
    """What HTTPS is served with.

    Attributes:
        certificate: chain in PEM, the server's own first.
        key: its private key in PEM; None where it is in the same file.
        password_file: holds the private key's password.
        client_ca: certificates that those of clients are checked against.
        require_client: refuse clients without one.
    """

    certificate: Path
    key: Path | None = None
    password_file: Path | None = None
    client_ca: Path | None = None
    require_client: bool = False

    @classmethod
    def of(cls, settings: Settings) -> "TlsFiles | None":
        """None where plain HTTP is served.

        Raises:
            InvalidSettings: options that mean nothing without others.
        """
        if settings.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_keyfile_password_file", "ssl_ca_certs", "ssl_require_client_cert"):
                if getattr(settings, name):
                    raise InvalidSettings(f"--{name.replace('_', '-')} needs --ssl-certfile")
            return None
        if settings.ssl_require_client_cert and settings.ssl_ca_certs is None:
            raise InvalidSettings("--ssl-require-client-cert needs --ssl-ca-certs, to check certificates against")
        return cls(
            settings.ssl_certfile,
            settings.ssl_keyfile,
            settings.ssl_keyfile_password_file,
            settings.ssl_ca_certs,
            settings.ssl_require_client_cert,
        )


def make_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 or later, with the certificate, and with clients checked where that was asked for.

    Raises:
        InvalidSettings: names the file that cannot be used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, files)
    if files.client_ca is not None:
        try:
            context.load_verify_locations(cafile=files.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidSettings(f"--ssl-ca-certs {files.client_ca}: {_reason(error)}") from error
        context.verify_mode = ssl.CERT_REQUIRED if files.require_client else ssl.CERT_OPTIONAL
    return context


def load_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Read the certificate and its key into a context, also one in use: connections from then on get the new one.

    Raises:
        InvalidSettings: names the file that cannot be used; the context is then unchanged.
    """
    for option, path in (("--ssl-certfile", files.certificate), ("--ssl-keyfile", files.key)):
        try:
            if path is not None and path.is_fifo():  # opening it would wait for who writes to it
                raise InvalidSettings(f"{option} {path}: a pipe, must be a file")
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise InvalidSettings(f"{option} {path}: {_reason(error)}") from error
    password = _password(files.password_file)
    asked = False

    def give_password() -> bytes:
        nonlocal asked
        asked = True
        return password

    try:
        # Tried elsewhere first: a pair that does not match would leave the context with half of it. Without a password
        # OpenSSL would ask for one on the terminal, so an empty one is given.
        for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            target.load_cert_chain(files.certificate, files.key, password=give_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        pair = f"--ssl-certfile {files.certificate}" + (f", --ssl-keyfile {files.key}" if files.key else "")
        reason = _reason(error)
        if asked and getattr(error, "reason", None) != MISMATCH:  # it was not even read
            reason = "the password does not fit" if password else "the key needs --ssl-keyfile-password-file"
        raise InvalidSettings(f"{pair}: {reason}") from error


def _password(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PASSWORD_BYTES + 1)
    except OSError as error:
        raise InvalidSettings(f"--ssl-keyfile-password-file {path}: {_reason(error)}") from error
    password = data.rstrip(b"\r\n")
    if not password or len(data) > MAX_PASSWORD_BYTES:
        raise InvalidSettings(f"--ssl-keyfile-password-file {path}: allowed: 1 to {MAX_PASSWORD_BYTES} bytes")
    return password


def _reason(error: Exception) -> str:
    """In words of ours where OpenSSL's say little."""
    if not isinstance(error, ssl.SSLError):
        return (isinstance(error, OSError) and error.strerror) or "not usable"
    reason = error.reason or ""
    known = {
        MISMATCH: "the private key is not the certificate's",
        "NO_CERTIFICATE_OR_CRL_FOUND": "no certificate in PEM form in it",
        "NO_START_LINE": "nothing in PEM form in it, or no private key beside the certificate: --ssl-keyfile",
    }
    return known.get(reason) or f"not usable ({reason.lower().replace('_', ' ') or 'no PEM form in it'})"
