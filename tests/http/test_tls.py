"""HTTPS and mutual TLS with the real command, certificates made on the spot."""

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from app.settings import InvalidSettings, Settings
from app.tls import TlsFiles, load_certificate, make_context
from tests.http.conftest import png
from tests.http.test_socket import MODEL, clean_environment, free_port

PNG = {"content-type": "image/png"}
PASSWORD = b"open sesame"


class Files(NamedTuple):
    """A CA and what it signed, as files."""

    ca: trustme.CA
    ca_file: Path
    certificate: Path
    key: Path
    encrypted_key: Path
    password: Path
    client: trustme.LeafCert


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    server = ca.issue_cert("127.0.0.1", "localhost")
    made = Files(
        ca,
        *(directory / name for name in ("ca.pem", "server.pem", "server.key", "encrypted.key", "password")),
        ca.issue_cert("client.example"),
    )
    ca.cert_pem.write_to_path(str(made.ca_file))
    write_pair(server, made.certificate, made.key)
    private = load_pem_private_key(server.private_key_pem.bytes(), None)
    made.encrypted_key.write_bytes(
        private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(PASSWORD))
    )
    made.password.write_bytes(PASSWORD + b"\n")
    return made


def write_pair(leaf: trustme.LeafCert, certificate: Path, key: Path) -> None:
    certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())


def trusting(files: Files, *, with_certificate: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files.ca_file))
    if with_certificate:
        files.client.configure_cert(context)
    return context


@contextlib.contextmanager
def serving(*flags: str, context: ssl.SSLContext) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """The command on an HTTPS port, ready; its log is a file."""
    port = free_port()
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), "--model", MODEL, "--film-workers", "1"]
    url = f"https://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *flags], stderr=log, env=clean_environment())
        try:
            for _ in range(600):
                if process.poll() is not None:
                    pytest.fail(f"the service ended with {process.returncode}: {Path(log.name).read_text()}")
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health/ready", verify=context).status_code == 200:
                        break
                time.sleep(0.1)
            else:
                pytest.fail("the service did not become ready")
            yield process, url, Path(log.name)
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def https(files: Files) -> Iterator[tuple[str, Path]]:
    """With a key that has a password, so that this road is taken too."""
    flags = ("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.encrypted_key))
    password = ("--ssl-keyfile-password-file", str(files.password))
    with serving(*flags, *password, context=trusting(files)) as (_, url, log):
        yield url, log


class TestHttps:
    def test_answers_are_right(self, https: tuple[str, Path], files: Files) -> None:
        with httpx.Client(verify=trusting(files), timeout=60) as client:
            for level in (1, 2):
                answer = client.post(f"{https[0]}/v1/encode", content=png(level), headers=PNG)
                assert answer.status_code == 200
                assert answer.json()["data"][0]["num_tokens"] == 1
            assert client.get(f"{https[0]}/v1/models").json()["data"][0]["id"] == "kimi-k3"

    def test_a_large_body_and_a_large_answer(self, https: tuple[str, Path], files: Files) -> None:
        body = png(1) + bytes(8_000_000)  # what follows a PNG's end is not looked at
        answer = httpx.post(f"{https[0]}/v1/encode", content=body, headers=PNG, verify=trusting(files), timeout=60)
        assert answer.status_code == 200
        assert answer.json()["usage"]["media_bytes"] == len(body)

    def test_a_client_that_does_not_know_the_ca_refuses(self, https: tuple[str, Path]) -> None:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{https[0]}/health", verify=ssl.create_default_context())

    def test_plain_http_is_refused(self, https: tuple[str, Path], files: Files) -> None:
        url, log = https
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url.replace('https', 'http')}/health")
        assert httpx.get(f"{url}/health", verify=trusting(files)).status_code == 200
        assert "Traceback" not in log.read_text()

    def test_tls_1_1_is_refused(self, https: tuple[str, Path], files: Files) -> None:
        context = trusting(files)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{https[0]}/health", verify=context)

    def test_bytes_that_are_no_http_are_400_inside_tls_too(self, https: tuple[str, Path], files: Files) -> None:
        with connected(https[0], trusting(files)) as connection:
            connection.sendall(b"NOT HTTP\r\n\r\n")
            answer = b""
            while piece := connection.recv(4096):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 400 ")


def connected(url: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    host, port = url.removeprefix("https://").split(":")
    return context.wrap_socket(socket.create_connection((host, int(port)), timeout=30), server_hostname=host)


@pytest.fixture(scope="module")
def mutual(files: Files) -> Iterator[str]:
    pair = ("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key))
    flags = (*pair, "--ssl-ca-certs", str(files.ca_file), "--ssl-require-client-cert")
    with serving(*flags, context=trusting(files, with_certificate=True)) as (_, url, _log):
        yield url


class TestMutual:
    def test_a_client_with_a_certificate_is_served(self, mutual: str, files: Files) -> None:
        context = trusting(files, with_certificate=True)
        answer = httpx.post(f"{mutual}/v1/encode", content=png(1), headers=PNG, verify=context, timeout=60)
        assert answer.status_code == 200

    def test_one_without_is_refused(self, mutual: str, files: Files) -> None:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{mutual}/health", verify=trusting(files))

    def test_one_with_anothers_is_refused(self, mutual: str, files: Files) -> None:
        context = trusting(files)
        trustme.CA().issue_cert("client.example").configure_cert(context)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{mutual}/health", verify=context)


def test_sigterm_finishes_what_was_accepted_and_exits_0(files: Files) -> None:
    body = png(5)
    lines = ("POST /v1/encode HTTP/1.1", "Host: x", "Content-Type: image/png", f"Content-Length: {len(body)}")
    flags = ("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key))
    context = trusting(files)
    with serving(*flags, context=context) as (process, url, _), connected(url, context) as connection:
        connection.sendall("\r\n".join((*lines, "", "")).encode() + body[:-1])
        in_flight = ""
        while "moonvit_requests_in_flight 1.0" not in in_flight:
            in_flight = httpx.get(f"{url}/metrics", verify=context).text
        process.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/health/ready", verify=context).status_code != 503:
            pass
        connection.sendall(body[-1:])
        assert connection.recv(12) == b"HTTP/1.1 200"
        assert process.wait(timeout=30) == 0


def test_a_body_that_does_not_come_is_408(files: Files) -> None:
    flags = ("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key), "--body-timeout-s", "0.3")
    head = b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 50\r\n\r\nx"
    context = trusting(files)
    with serving(*flags, context=context) as (_, url, _), connected(url, context) as connection:
        connection.sendall(head)
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_sighup_takes_a_new_certificate_and_not_a_broken_one(files: Files, tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    write_pair(files.ca.issue_cert("127.0.0.1", common_name="first"), certificate, key)
    context = trusting(files)
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    with serving(*flags, context=context) as (process, url, log):
        assert common_name(url, context) == "first"
        certificate.write_bytes(files.ca.issue_cert("127.0.0.1", common_name="other").cert_chain_pems[0].bytes())
        process.send_signal(signal.SIGHUP)
        while "certificate not read again" not in log.read_text():
            time.sleep(0.01)
        assert "the private key is not the certificate's" in log.read_text()
        assert common_name(url, context) == "first"
        write_pair(files.ca.issue_cert("127.0.0.1", common_name="second"), certificate, key)
        process.send_signal(signal.SIGHUP)
        while "certificate read again" not in log.read_text():
            time.sleep(0.01)
        assert common_name(url, context) == "second"


def common_name(url: str, context: ssl.SSLContext) -> str:
    with connected(url, context) as connection:
        subject = connection.getpeercert()["subject"]  # type: ignore[index]
    return dict(pair for (pair,) in subject)["commonName"]  # type: ignore[misc]


class TestFiles:
    """What cannot be used is a message before anything is loaded."""

    def test_the_command_exits_with_2(self, files: Files) -> None:
        command = [sys.executable, "-m", "app.cli", "serve", "--port", str(free_port()), "--model", "/no/such/model"]
        done = subprocess.run(
            [*command, "--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.encrypted_key)],
            capture_output=True,
            text=True,
            timeout=60,
            env=clean_environment(),
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 2
        assert "needs --ssl-keyfile-password-file" in done.stderr  # and not that the model is missing
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"certificate": "absent.pem"}, r"--ssl-certfile .*absent.pem: No such file or directory"),
            ({"key": "absent.key"}, r"--ssl-keyfile .*absent.key: No such file or directory"),
            ({"certificate": "password"}, r"no certificate|PEM form|not usable"),
            ({"key": "password"}, r"PEM form|not usable"),
            ({"key": "other.key"}, r"the private key is not the certificate's"),
            ({"key": None}, r"not usable|PEM form"),
            ({"key": "encrypted.key"}, r"needs --ssl-keyfile-password-file"),
            (
                {"key": "encrypted.key", "password_file": "password", "certificate": "ca.pem"},
                r"is not the certificate's",
            ),
            ({"key": "encrypted.key", "password_file": "wrong"}, r"the password does not fit"),
            ({"key": "encrypted.key", "password_file": "absent"}, r"--ssl-keyfile-password-file .*absent: No such"),
            ({"key": "encrypted.key", "password_file": "empty"}, r"allowed: 1 to 1024 bytes"),
            ({"client_ca": "absent.pem"}, r"--ssl-ca-certs .*absent.pem: No such file or directory"),
            ({"client_ca": "password"}, r"--ssl-ca-certs .*password: (no certificate|no PEM|not usable)"),
        ],
    )
    def test_each_is_named(self, options: dict[str, str | None], why: str, files: Files) -> None:
        directory = files.certificate.parent
        (directory / "wrong").write_bytes(b"another password")
        (directory / "empty").write_bytes(b"\n")
        (directory / "other.key").write_bytes(trustme.CA().issue_cert("x.example").private_key_pem.bytes())
        paths = {name: None if value is None else directory / value for name, value in options.items()}
        with pytest.raises(InvalidSettings, match=why) as caught:
            make_context(TlsFiles(**{"certificate": files.certificate, "key": files.key} | paths))  # type: ignore[arg-type]
        assert "sesame" not in str(caught.value)

    def test_a_pair_in_one_file(self, files: Files, tmp_path: Path) -> None:
        both = tmp_path / "both.pem"
        both.write_bytes(files.key.read_bytes() + files.certificate.read_bytes())
        make_context(TlsFiles(both))

    def test_a_broken_pair_leaves_a_context_as_it_was(self, files: Files) -> None:
        context = make_context(TlsFiles(files.certificate, files.key))
        with pytest.raises(InvalidSettings):
            load_certificate(context, TlsFiles(files.ca_file, files.key))
        left, right = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = context.wrap_bio(left, right, server_side=True)
        client = trusting(files).wrap_bio(right, left, server_hostname="localhost")
        for _ in range(4):
            for side in (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        assert client.version() == "TLSv1.3"

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"ssl_keyfile": "x"}, "--ssl-keyfile needs --ssl-certfile"),
            ({"ssl_keyfile_password_file": "x"}, "--ssl-keyfile-password-file needs --ssl-certfile"),
            ({"ssl_ca_certs": "x"}, "--ssl-ca-certs needs --ssl-certfile"),
            ({"ssl_require_client_cert": True}, "--ssl-require-client-cert needs --ssl-certfile"),
            ({"ssl_certfile": "x", "ssl_require_client_cert": True}, "--ssl-require-client-cert needs --ssl-ca-certs"),
        ],
    )
    def test_options_that_mean_nothing_alone(self, settings: dict[str, object], why: str) -> None:
        with pytest.raises(InvalidSettings, match=why):
            TlsFiles.of(Settings(**settings))  # type: ignore[arg-type]

    def test_plain_http_without_any(self) -> None:
        assert TlsFiles.of(Settings()) is None
