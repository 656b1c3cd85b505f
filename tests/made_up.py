"""A simulated system: files like those of /proc and of control groups, in a directory."""

from pathlib import Path

MIB = 1 << 20


class System:
    """Files below a root, like those of the kernel."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/self/cgroup", "")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def append(self, path: str, text: str) -> None:
        with (self.root / path).open("a") as file:
            file.write(text)

    def set_available(self, nbytes: int, *more: str) -> None:
        lines = [
            "MemTotal:       24684084 kB",
            f"MemAvailable:   {nbytes // 1024} kB",
            "HugePages_Total:       0",
            *more,
        ]
        self.write("proc/meminfo", "\n".join(lines) + "\n")

    def join_v2(self, path: str) -> None:
        """Put this process into a group of the unified hierarchy."""
        self.append("proc/self/cgroup", f"0::{path}\n")

    def join_v1(self, path: str) -> None:
        self.append("proc/self/cgroup", f"9:name=systemd:/\n4:memory:{path}\n3:cpu,cpuacct:/x\n")

    def group_v2(self, directory: str, limit: object, usage: int, **stat: int) -> None:
        base = f"sys/fs/cgroup{directory}"
        self.write(f"{base}/memory.max", f"{limit}\n")
        self.write(f"{base}/memory.current", f"{usage}\n")
        self.write(f"{base}/memory.stat", _lines(anon=usage, **stat))

    def group_v1(self, directory: str, limit: int, usage: int, **stat: int) -> None:
        base = f"sys/fs/cgroup/memory{directory}"
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{base}/memory.stat", _lines(rss=usage, **stat))


def _lines(**values: int) -> str:
    return "".join(f"{name} {value}\n" for name, value in values.items())
