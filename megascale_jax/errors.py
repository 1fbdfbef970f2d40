"""Every error that a user can cause, or that the outside world can cause to a run.

    MegascaleError
    +-- UsageError            the request cannot be carried out as given; exit code 2, nothing was written
    |   +-- ConfigError       a YAML file, an override, or a combination of fields
    |   +-- DataError         a corpus, a tokenizer or a prepared data folder
    |   +-- RunFolderError    a run folder that belongs to another run, or is none
    |   +-- TraceError        a trace of operations that cannot be read, or contradicts itself
    +-- CheckpointError       a checkpoint that is missing, cannot be read or is of another model
    |   +-- DamagedCheckpointError   its content is not what was written; an older one serves
    +-- StorageError          a storage that refused, lost or damaged something; an OSError too; exit code 2
    +-- LinkError             a driver that cannot be reached, refuses, or does not answer; an OSError too; exit code 2
    +-- CompileError          the compiler for absent GPUs gave up; exit code 1
    +-- CorruptStateError     copies of the state that should be equal differ; exit code 3
    +-- StuckProcessError     a training process that cannot be killed
    +-- BackendError          whatever runs nodes refused or failed

Catch as wide as needed. A message says what was got, what was expected, and what to do about it.
"""


class MegascaleError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(MegascaleError, ValueError):
    """The request cannot be carried out as given. The command line exits with code 2."""


class ConfigError(UsageError):
    """A configuration file, an override or a combination of fields is wrong."""


class DataError(UsageError):
    """A corpus, a tokenizer file or a prepared data folder cannot be used."""


class RunFolderError(UsageError):
    """A folder is not a run, or belongs to a run with another configuration."""


class TraceError(UsageError):
    """A trace of operations cannot be read, or says things that cannot all be true."""


class CheckpointError(MegascaleError):
    """A checkpoint is missing, cannot be read or belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """What a checkpoint holds is not what was written: a wrong checksum, a missing or a short file."""


class StorageError(MegascaleError, OSError):
    """A storage refused, lost or damaged something. The command line exits with code 2."""


class LinkError(MegascaleError, ConnectionError):
    """The driver cannot be reached, refuses, or does not answer in time. The command line exits with code 2."""


class CompileError(MegascaleError):
    """The compiler for absent GPUs aborted or ran out of time. The command line exits with code 1."""


class CorruptStateError(MegascaleError):
    """Copies of the training state that should be equal differ: a device or a wire changed bits. The command line exits with code 3."""


class StuckProcessError(MegascaleError):
    """A process is still there after SIGKILL: it hangs in the kernel, and its node with it."""


class JournalError(MegascaleError):
    """An event of a job is not on the disk, so nothing may be done about it."""


class BackendError(MegascaleError):
    """Whatever runs nodes refused a request, or failed at it; the driver asks again."""
