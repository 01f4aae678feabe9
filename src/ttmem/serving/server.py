"""`ttmem serve`: from settings to a listening server."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import socket

from ttmem.errors import ServeError
from ttmem.serving.settings import ServeSettings

PACKAGES = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
INSTALL = "pip install 'ttmem[serve]'"
GRACE = 10
"""Seconds that answers under way have to end when the server is told to stop."""


def check_packages() -> None:
    """Raise ServeError with the install line when a package is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ServeError(f"serving needs the package {missing[0].replace('_', '-')!r}: {INSTALL}")


def check_address(settings: ServeSettings) -> None:
    """Raise ServeError for an address that others reach, without keys."""
    if settings.key_file is None and not is_loopback(settings.host):
        raise ServeError(
            f"{settings.host} can be reached from other machines: name a file of keys with --api-key-file, or listen "
            "on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether an address, or every address of a name, is of this machine alone."""
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


def bind(host: str, port: int) -> socket.socket:
    """The socket, bound but not yet listening. Raises ServeError when it is taken or the address is not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ServeError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    return bound


def serve(settings: ServeSettings) -> None:
    """Load the model and serve until told to stop. Raises ServeError, ModelError."""
    check_packages()
    check_address(settings)
    if settings.static is not None and not settings.static.is_dir():
        raise ServeError(f"there is no folder {settings.static} to serve")
    import uvicorn

    from ttmem.models import load_model
    from ttmem.serving.app import create_app, served_name
    from ttmem.serving.keys import Keys
    from ttmem.serving.logs import configure_logs

    keys = Keys.read(settings.key_file)
    listening = bind(settings.host, settings.port)
    with listening:
        configure_logs()
        model = load_model(settings.model, dtype=settings.dtype, device=settings.device)
        app = create_app(settings, model, keys)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE,
        )
        host, port = listening.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        fields = {"url": f"http://{address}:{port}", "model": served_name(settings, model), "keys": keys.needed}

        class Announcing(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                logging.getLogger("ttmem.serving").info("listening", extra={"fields": fields})

        Announcing(config).run(sockets=[listening])
