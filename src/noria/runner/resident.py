"""What this process need not keep in memory between its start and its first request."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

_SMAPS = Path("/proc/self/smaps")
# A mapping that is not writable, of a library: addresses, permissions, offset, device, inode, path; then its sizes.
_LIBRARY = re.compile(r"^(\w+)-(\w+) r-[x-]p .*\.so[^/\n]*\n((?:[A-Z].*\n)+)", re.MULTILINE)
_SIZE = re.compile(r"^(Rss|Anonymous|Swap): +(\d+) kB", re.MULTILINE)
_MIN_KIB = 1024  # of a mapping that is worth a call


def give_back_memory() -> None:
    """Gives back to the system what the allocator of C keeps of memory that was freed, a compiler's above all, and the
    pages of libraries that ran until now: most of XLA's code is only needed to start and to compile, 80 MiB of it.

    Code that runs again comes back from the system's cache of files, page by page. Does nothing where there are no such
    calls: they are those of glibc and of Linux.
    """
    if os.name != "posix":
        return
    library = ctypes.CDLL(None)
    if (trim := getattr(library, "malloc_trim", None)) is not None:
        trim(0)
    if _SMAPS.exists():
        for begin, size in list(_clean_pages()):
            library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _clean_pages() -> Iterator[tuple[int, int]]:
    """Address and bytes of the parts of libraries that are in memory exactly as they are in their files.

    A page that the linker has changed (relocations), or a debugger (break points), counts as anonymous or is swapped
    out, and would be lost: a mapping with any such page is left alone.
    """
    for begin, end, sizes in _LIBRARY.findall(_SMAPS.read_text()):
        kib = {name: int(number) for name, number in _SIZE.findall(sizes)}
        # A kernel that does not tell all of them gets nothing back.
        if kib.get("Rss", 0) >= _MIN_KIB and kib.get("Anonymous") == kib.get("Swap") == 0:
            yield int(begin, 16), int(end, 16) - int(begin, 16)
