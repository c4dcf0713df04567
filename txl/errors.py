"""What a user can get wrong. Each message says what was expected, what was found, where, and what fixes it."""


class TxlError(ValueError):
    """Base of all errors that a user can mend; the command line prints one line and exits with status 2."""


class ConfigError(TxlError):
    """A setting is unknown, has the wrong type, or contradicts another."""


class DataError(TxlError):
    """A text or token shard is missing, empty, too short, malformed or damaged."""


class TokenizerError(TxlError):
    """A tokenizer file cannot be read, or does not belong to the data or model it is used with."""


class CheckpointError(TxlError):
    """A checkpoint is missing, incomplete, altered, or belongs to another model."""


class TrainingError(TxlError):
    """Training cannot go on: the loss or the gradient is not finite."""
