"""Errors a user can cause. The command line prints them as one line, without a traceback."""


class NoriaError(Exception):
    """Base class: the message names what is wrong and what to do instead."""


class ConfigError(NoriaError, ValueError):
    """An engine option, or a combination of options, that cannot work. Raised at start."""


class RequestError(NoriaError, ValueError):
    """A request that cannot be served. Raised at admission; touches no other request."""


class WeightsError(NoriaError):
    """A model file is missing, truncated, or of a kind that is not supported."""


class CompileError(NoriaError):
    """A program does not compile, or `strict_compile` is on and warm-up did not compile a shape that was asked for."""


class EngineDeadError(NoriaError):
    """The engine loop ended with an error; no request can be served."""


class UnavailableError(NoriaError):
    """The engine cannot take a request now, but may a little later."""


class QueueFullError(UnavailableError):
    """As many requests wait as may."""


class RequestTimeoutError(NoriaError):
    """A request took longer than it was given; it was aborted."""


def named(kind: str, reason: str) -> NoriaError:
    """The error of the class `kind` that another process reported; EngineDeadError where there is no such class."""
    found = globals().get(kind)
    return found(reason) if isinstance(found, type) and issubclass(found, NoriaError) else EngineDeadError(reason)
