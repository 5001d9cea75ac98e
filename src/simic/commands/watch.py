"""simic watch: runs and evaluations live, in the browser or in the terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from simic.commands.flags import POSITIONAL
from simic.commands.train import RUNS

PORT = 8620


@dataclass(frozen=True, kw_only=True)
class WatchCommand:
    """Show runs and evaluations live, in the browser or in the terminal."""

    path: Path = field(default=RUNS, metadata=POSITIONAL)
    """Directory of runs or evaluations, or one of them."""
    host: str = "127.0.0.1"
    """Name or address to listen on. Other machines can only reach it if this is changed; 0.0.0.0 means all."""
    port: int = PORT
    """Port to listen on; 0 takes any free one."""
    no_token: bool = False
    """Let every user of this machine read along, without a token in the address."""
    open: bool = False
    """Open the page in a browser."""
    terminal: bool = False
    """Show it in the terminal instead; nothing listens on a port."""

    def run(self) -> int:
        """Check the directory, then serve it, or show it here."""
        if not self.path.exists():
            hint = "`simic train` makes it" if self.path == RUNS else "`simic watch` without it looks in runs/"
            raise FileNotFoundError(f"there is no directory {self.path}; {hint}")
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; name the directory of a run, or one that holds runs")
        if self.terminal:
            from simic.dashboard.terminal import watch_in_terminal

            return watch_in_terminal(self.path)
        try:
            from simic.dashboard.web_server import serve
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
                raise
            raise ValueError(
                f"simic watch needs {error.name}; install it with: pip install 'simic-rl[watch]', "
                "or look in the terminal with --terminal"
            ) from None
        return serve(self.path, host=self.host, port=self.port, use_token=not self.no_token, open_browser=self.open)
