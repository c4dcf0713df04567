"""Transformer-XL (Dai et al. 2019): a language model around a backbone with recurrent memory.

Read from the top: the language model, the backbone, its layer, the feed-forward block.

Shape letters: B batch, L positions of the segment, M positions in memory, S = M + L, N distances, V vocabulary,
D width of the model.
"""

import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from txl.attention import RelativeAttention, sinusoid
from txl.config import from_dict
from txl.dropout import Dropout
from txl.embedding import Embedding, Softmax
from txl.errors import CheckpointError, ConfigError
from txl.memory import Memory


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of a model. The defaults of the choices are the original's."""

    vocab_size: int | None = None
    """Number of tokens; taken from the tokenizer when absent."""
    n_layer: int = 6
    """Number of layers."""
    n_head: int = 8
    """Attention heads of a layer."""
    d_model: int = 256
    """Width of the hidden states."""
    d_head: int | None = None
    """Width of a head; d_model / n_head when absent."""
    d_inner: int = 1024
    """Width inside the feed-forward block."""
    d_embed: int | None = None
    """Width of the embedding; d_model when absent."""
    dropout: float = 0.1
    """Dropout of embeddings, of R, and of both blocks of a layer."""
    dropatt: float = 0.0
    """Dropout of the attention weights."""
    mem_len: int = 128
    """Positions kept in memory, in training and unless evaluation says otherwise."""
    clamp_len: int = 0
    """Distances beyond it count as this one; 0 is off."""
    same_length: bool = False
    """Every query sees at most mem_len keys, itself among them, however much memory there is."""
    pre_lnorm: bool = False
    """Normalise the input of each block instead of its output."""
    final_norm: bool = True
    """With pre_lnorm, normalise the output of the last layer too; false for weights of the original code."""
    untie_r: bool = False
    """Give each layer its own u and v."""
    position: str = "xl"
    """Relative positions: "xl", sinusoidal R with W_kR, u and v."""
    memory_init: str = "empty"
    """Memory starts "empty" and grows (PyTorch original), or as attended "zeros" (TensorFlow, Hugging Face)."""
    tie_weight: bool = True
    """Use the embedding table as output weights."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    proj_init_std: float = 0.01
    """Standard deviation of the projections between d_embed and d_model."""

    def __post_init__(self):
        for name in ("vocab_size", "n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"model.{name} must be at least 1, got {value}")
        for name in ("mem_len", "clamp_len", "init_std", "proj_init_std"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"model.{name} must be at least 0, got {getattr(self, name)}")
        for name, value in asdict(self).items():
            if type(value) in (int, float) and value >= 2**31:
                raise ConfigError(f"model.{name} must be below 2 ** 31, got {value}")
        for name in ("dropout", "dropatt"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name} must be in [0, 1), got {getattr(self, name)}")
        if self.d_head is None and self.d_model % self.n_head:
            raise ConfigError(
                f"model.n_head {self.n_head} does not divide model.d_model {self.d_model}: "
                "give model.d_head, or another model.n_head"
            )
        if self.d_model % 2:
            raise ConfigError(f"model.d_model must be even for the sinusoids, got {self.d_model}")
        if self.position != "xl":
            raise ConfigError(f'model.position must be "xl", got "{self.position}"')
        if self.memory_init not in ("empty", "zeros"):
            raise ConfigError(f'model.memory_init must be "empty" or "zeros", got "{self.memory_init}"')


@dataclass(frozen=True)
class Output:
    """What a forward pass returns."""

    memory: Memory
    """The memory for the next segment."""
    logits: Tensor | None = None
    """[B, L, V], when no targets were given."""
    nll: Tensor | None = None
    """[B, L] nats in token order, 0 where the target is -100."""
    loss: Tensor | None = None
    """Mean of nll over the targets that count, a scalar."""


class TransformerXL(nn.Module):
    """The language model: embedding, backbone, softmax."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("model.vocab_size is absent: give the number of tokens, or train with a tokenizer")
        self.config = config
        d_embed = config.d_embed or config.d_model
        self.embedding = Embedding(config.vocab_size, d_embed, config.d_model)
        self.backbone = Backbone(config)
        self.softmax = Softmax(config.vocab_size, d_embed, config.d_model, tied=config.tie_weight)
        self.init_weights()

    def forward(self, tokens: Tensor, memory: Memory | None = None, targets: Tensor | None = None) -> Output:
        """One segment.

        Args:
            tokens: [B, L] integers, L >= 1.
            memory: of the positions before the segment; a new one when absent. Its mem_len holds for what follows.
            targets: [B, L] int64, the token after each; -100 does not count.

        Returns:
            The next memory, and logits without targets or nll and loss with them.

        Raises:
            ValueError: tokens or targets of a wrong shape or beyond the vocabulary; a memory of another shape.
        """
        self._check(tokens, targets)
        h, memory = self.backbone(self.embedding(tokens), memory)
        if targets is None:
            return Output(memory, logits=self.softmax(h, self.embedding.weight))
        nll = self.softmax.nll(h, targets, self.embedding.weight)
        return Output(memory, nll=nll, loss=nll.sum() / (targets != -100).sum().clamp(min=1))

    def init_memory(self, batch_size: int, mem_len: int | None = None) -> Memory:
        """A memory of no past, for mem_len positions: the trained number, or more, or fewer, down to 0."""
        return self.backbone.init_memory(batch_size, mem_len)

    def init_weights(self) -> None:
        """The published initialisation, see the function init_weights."""
        init_weights(self, self.config)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors. An existing pair is replaced, each file at once."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / ".model.safetensors.tmp"
        save_file({name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}, temporary)
        temporary.replace(directory / "model.safetensors")
        temporary = directory / ".config.json.tmp"
        temporary.write_text(json.dumps(asdict(self.config), indent=2) + "\n", encoding="utf-8")
        temporary.replace(directory / "config.json")

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> "TransformerXL":
        """The model that save_pretrained wrote, in evaluation mode.

        Raises:
            CheckpointError: a file is missing or damaged, or the weights are not those of the configuration.
        """
        directory = Path(directory)
        for name in ("config.json", "model.safetensors"):
            if not (directory / name).is_file():
                raise CheckpointError(f"no {name} in {directory}: expected a directory written by save_pretrained")
        where = str(directory / "config.json")
        try:
            settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{where} is not JSON: {error}") from error
        if not isinstance(settings, dict):
            raise CheckpointError(f"{where}: expected a JSON object of settings")
        if settings.get("vocab_size") is None:
            raise CheckpointError(f"{where}: vocab_size is absent")
        model = cls(from_dict(ModelConfig, settings, where))
        try:
            weights = load_file(directory / "model.safetensors")
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{directory / 'model.safetensors'} is damaged: {error}") from error
        expected = model.state_dict()
        wrong = (
            [f"missing {name}" for name in expected.keys() - weights.keys()]
            + [f"unexpected {name}" for name in weights.keys() - expected.keys()]
            + [
                f"{name} is {list(weights[name].shape)}, expected {list(expected[name].shape)}"
                for name in expected.keys() & weights.keys()
                if expected[name].shape != weights[name].shape
            ]
        )
        if wrong:
            raise CheckpointError(f"{directory / 'model.safetensors'} is of another model: {'; '.join(sorted(wrong))}")
        model.to(weights["embedding.weight"].dtype).load_state_dict(weights)
        return model.eval()

    def _check(self, tokens: Tensor, targets: Tensor | None) -> None:
        if tokens.dim() != 2 or tokens.shape[1] < 1:
            raise ValueError(f"expected tokens [batch, length >= 1], got {list(tokens.shape)}")
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(f"expected targets {list(tokens.shape)} like tokens, got {list(targets.shape)}")
        if tokens.device.type != "cpu" or torch.compiler.is_compiling():
            return  # a look at the values would stop the device; shards are checked when they are opened
        for name, ids in (("token", tokens), ("target", targets)):
            if ids is None:
                continue
            counted = torch.ones_like(ids, dtype=torch.bool) if ids is tokens else ids != -100
            wrong = counted & ((ids < 0) | (ids >= self.config.vocab_size))
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                raise ValueError(
                    f"{name} id {int(ids[row, column])} at row {row}, position {column} is outside the vocabulary of "
                    f"{self.config.vocab_size}: is the text encoded with this model's tokenizer?"
                )


class Backbone(nn.Module):
    """The layers over vectors [B, L, d_model], for inputs that are not tokens too.

    clamp_len and same_length are plain attributes: evaluation may set them to other values than in training.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.clamp_len, self.same_length = config.clamp_len, config.same_length
        d_head = config.d_head or config.d_model // config.n_head
        if config.untie_r:
            self.u = self.v = None
        else:
            self.u = nn.Parameter(torch.empty(config.n_head, d_head))
            self.v = nn.Parameter(torch.empty(config.n_head, d_head))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.final_norm = nn.LayerNorm(config.d_model) if config.pre_lnorm and config.final_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        init_weights(self, config)

    def forward(self, h: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """h [B, L, d_model] and the memory of what came before -> [B, L, d_model] and the next memory."""
        memory = self.init_memory(h.shape[0]) if memory is None else memory
        self._check(h, memory)
        window = max(memory.mem_len - 1, 0) if self.same_length else None
        key_start = memory.start if memory.ragged else None

        h = self.dropout(h)
        R = self.dropout(self._R(memory.length + h.shape[1], window, h))  # one mask, shared by layers and rows
        inputs = []
        for layer, m in zip(self.layers, memory.states, strict=True):
            inputs.append(h)
            h = layer(h, m, R, self.u, self.v, window, key_start)
        return self.dropout(self.final_norm(h)), memory.next(inputs)

    def init_memory(self, batch_size: int, mem_len: int | None = None) -> Memory:
        """As TransformerXL.init_memory."""
        config, weight = self.config, self.layers[0].attention.w_q.weight
        mem_len = config.mem_len if mem_len is None else mem_len
        if mem_len < 0:
            raise ConfigError(f"mem_len must be at least 0, got {mem_len}")
        zeros = config.memory_init == "zeros"
        return Memory.new(config.n_layer, batch_size, config.d_model, mem_len, zeros, weight.device, weight.dtype)

    def _R(self, S: int, window: int | None, h: Tensor) -> Tensor:
        """[N, d_model]: sinusoids of the distances 0 ... N-1 that differ; farther ones take the last row."""
        N = min(S, S if window is None else window + 1, self.clamp_len + 1 if self.clamp_len else S)
        return sinusoid(torch.arange(N, device=h.device), self.config.d_model, h.dtype)

    def _check(self, h: Tensor, memory: Memory) -> None:
        config = self.config
        if h.dim() != 3 or h.shape[1] < 1 or h.shape[2] != config.d_model:
            raise ValueError(f"expected inputs [batch, length >= 1, {config.d_model}], got {list(h.shape)}")
        expected = (h.shape[0], memory.length, config.d_model)
        if len(memory.states) != config.n_layer or any(m.shape != expected for m in memory.states):
            found = [list(m.shape) for m in memory.states]
            raise ValueError(
                f"expected a memory of {config.n_layer} layers of [{expected[0]}, length, {expected[2]}], got "
                f"{len(found)} of {found[0] if found else 'nothing'}: use init_memory({expected[0]}) of this model"
            )


class Layer(nn.Module):
    """Attention and feed-forward block, each with its residual; normalised after (published) or before."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        self.attention = RelativeAttention(
            config.d_model, config.n_head, config.d_head, dropout=config.dropatt, own_biases=config.untie_r
        )
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config.d_model, config.d_inner, config.dropout)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)

    def forward(self, h: Tensor, memory: Tensor, R: Tensor, u, v, window, key_start) -> Tensor:
        """h [B, L, D], memory [B, M, D], R [N, D] -> [B, L, D]."""
        options = {"R": R, "u": u, "v": v, "window": window, "key_start": key_start}
        if self.pre_lnorm:
            context = self.attention_norm(torch.cat([memory.detach(), h], 1))  # the norm's gain learns from both
            h = h + self.dropout(self.attention(context[:, memory.shape[1] :], context=context, **options))
            return h + self.feed_forward(self.feed_forward_norm(h))
        h = self.attention_norm(h + self.dropout(self.attention(h, memory=memory, **options)))
        return self.feed_forward_norm(h + self.feed_forward(h))


class FeedForward(nn.Sequential):
    """Two linear maps with a ReLU between, dropout after each."""

    def __init__(self, d_model: int, d_inner: int, dropout: float):
        super().__init__(
            nn.Linear(d_model, d_inner),
            nn.ReLU(inplace=True),
            Dropout(dropout),
            nn.Linear(d_inner, d_model),
            Dropout(dropout),
        )


@torch.no_grad()
def init_weights(module: nn.Module, config: ModelConfig) -> None:
    """The published initialisation.

    weights, embedding, u and v      N(0, init_std^2), 0.02
    projections d_embed <-> d_model  N(0, proj_init_std^2), 0.01
    gains of the layer norms         N(1, init_std^2)
    biases                           0
    """
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" in name:
            nn.init.normal_(parameter, 1.0, config.init_std)
        else:
            nn.init.normal_(parameter, 0.0, config.proj_init_std if name.endswith("proj") else config.init_std)


@contextmanager
def eval_mode(model: nn.Module):
    """Dropout off within the block; the mode it was in comes back, also after an error."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
