"""`doctor`: the key file, and the certificate that clients will see."""

import ssl
import time
from collections.abc import Iterator

from app.auth import open_keys
from app.commands.findings import Finding
from app.metrics import Metrics
from app.settings import Settings
from app.tls import TlsFiles, make_context
from encoder import SetupError

SOON_DAYS = 21


def check_keys(settings: Settings) -> Iterator[Finding]:
    try:
        keys = open_keys(settings, Metrics())
    except SetupError as error:
        yield Finding("keys", "problem", str(error), "docs/security.md says what the file holds")
        return
    if keys is None:
        return
    if keys.path.stat().st_mode & 0o004:
        yield Finding("keys", "warning", f"{len(keys)} keys, which every user here can read", f"chmod o-r {keys.path}")
    else:
        yield Finding("keys", "ok", f"{len(keys)} keys")


def check_certificate(settings: Settings) -> Iterator[Finding]:
    try:
        files = TlsFiles.of(settings)
        if files is None:
            return
        context = make_context(files)
    except SetupError as error:
        yield Finding("tls", "problem", str(error))
        return
    clients = "clients need a certificate" if files.require_client else "clients need none"
    try:
        ends_s = expiry_s(context, files)
    except ssl.SSLCertVerificationError as error:
        yield Finding("tls", "problem", f"{files.certificate}: {error.verify_message}", "renew it, or set the clock")
        return
    days = (ends_s - time.time()) / 86400
    text = f"{files.certificate} is good for {days:.0f} more days; {clients}"
    if days < SOON_DAYS:
        yield Finding("tls", "warning", text, "renew it; SIGHUP then takes the new one without a restart")
    else:
        yield Finding("tls", "ok", text)


def expiry_s(context: ssl.SSLContext, files: TlsFiles) -> float:
    """When the certificate ends, in seconds since 1970: what a client sees that trusts this very certificate.

    Raises:
        ssl.SSLCertVerificationError: it has ended, or not begun.
    """
    context.verify_mode = ssl.CERT_NONE  # this client has none
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.load_verify_locations(cafile=files.certificate)
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    seen = client.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(seen["notAfter"])))
