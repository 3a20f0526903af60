"""Names of PyTorch, and what stands for them here: of modules, of objects, and of arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from inspect import getattr_static
from typing import Any

from dbrdist.core.usage.mistakes import warn

_LINK = {
    "parameters": "params()",
    "named_parameters": "namedparams()",
    "modules": "links()",
    "named_modules": "namedlinks()",
    "named_children": "namedlinks()",
    "state_dict": "dbrdist.serializers.save_npz(file, link)",
    "load_state_dict": "dbrdist.serializers.load_npz(file, link)",
    "eval": "with dbrdist.using_config('train', False):",
    "train": "with dbrdist.using_config('train', True):, which is the default",
    "training": "dbrdist.config.train",
    "to": "to_device('@numpy') or to_device('@cupy:0')",
    "cuda": "to_device('@cupy:0')",
    "cpu": "to_cpu()",
    "half": "dbrdist.global_config.dtype = 'float16' before the network is made",
    "float": "dbrdist.global_config.dtype = 'float32' before the network is made",
    "double": "dbrdist.global_config.dtype = 'float64' before the network is made",
    "zero_grad": "cleargrads()",
    "requires_grad_": "disable_update() and enable_update()",
    "register_buffer": "add_persistent(name, value)",
    "register_parameter": "assigning a Parameter within init_scope()",
    "register_module": "add_link(name, link)",
    "add_module": "add_link(name, link)",
    "apply": "for link in m.links():",
    "register_forward_hook": "add_hook(link_hook)",
    "register_forward_pre_hook": "add_hook(link_hook)",
    "register_backward_hook": "add_hook(link_hook)",
    "weight": "W",
    "bias": "b",
    "fit": "dbrdist.training.Trainer(updater, (epochs, 'epoch')).run()",
    "compile": "nothing: functions are fused as they run",
    "summary": "print(link), and count_params()",
    "save": "dbrdist.serializers.save_npz(file, link)",
    "load": "dbrdist.serializers.load_npz(file, link)",
    "predict": "calling the link itself",
}  # fmt: skip
_OPTIMIZER = {
    "step": "update()",
    "zero_grad": "cleargrads() of the link",
    "zero_grads": "cleargrads() of the link",
    "cleargrads": "cleargrads() of the link",
    "param_groups": "attributes such as optimizer.lr, and p.update_rule.hyperparam for one parameter",
    "add_param_group": "p.update_rule.hyperparam for one parameter",
    "state_dict": "dbrdist.serializers.save_npz(file, optimizer)",
    "load_state_dict": "dbrdist.serializers.load_npz(file, optimizer)",
    "minimize": "update(lossfun, *args)",
}
_VARIABLE = {
    "detach": "x.array, or x.unchain_backward() for the graph behind x",
    "detach_": "x.unchain_backward()",
    "clone": "F.copy(x, -1), or dbrdist.Variable(x.array.copy())",
    "numpy": "x.array",
    "tolist": "x.array.tolist()",
    "view": "x.reshape(shape)",
    "view_as": "x.reshape(y.shape)",
    "reshape_as": "x.reshape(y.shape)",
    "permute": "x.transpose(axes)",
    "t": "x.T",
    "cpu": "x.to_cpu()",
    "cuda": "x.to_gpu()",
    "to": "x.to_device(device), or F.cast(x, dtype)",
    "float": "F.cast(x, 'float32')",
    "double": "F.cast(x, 'float64')",
    "half": "F.cast(x, 'float16')",
    "long": "x.array.astype('int64')",
    "int": "x.array.astype('int32')",
    "bool": "x.array.astype(bool)",
    "type": "F.cast(x, dtype)",
    "zero_": "x.cleargrad() for the gradient, or x.array[...] = 0",
    "requires_grad_": "dbrdist.Variable(array, requires_grad=...)",
    "grad_fn": "x.creator",
    "is_leaf": "x.creator is None",
    "retain_grad": "loss.backward(retain_grad=True)",
    "register_hook": "a dbrdist.FunctionHook",
    "numel": "x.size",
    "dim": "x.ndim",
    "contiguous": "nothing: every function takes arrays of any strides",
    "unsqueeze": "F.expand_dims(x, axis)",
    "squeeze_": "F.squeeze(x, axis)",
    "flatten": "F.flatten(x), or x.reshape(len(x), -1)",
    "expand": "F.broadcast_to(x, shape)",
    "expand_as": "F.broadcast_to(x, y.shape)",
    "argmax": "x.array.argmax(axis)",
    "argmin": "x.array.argmin(axis)",
    "pow": "x ** p",
    "exp": "F.exp(x)",
    "log": "F.log(x)",
    "sqrt": "F.sqrt(x)",
    "abs": "abs(x)",
    "clamp": "F.clip(x, x_min, x_max)",
    "clip": "F.clip(x, x_min, x_max)",
    "softmax": "F.softmax(x, axis)",
    "sigmoid": "F.sigmoid(x)",
    "relu": "F.relu(x)",
    "tanh": "F.tanh(x)",
    "matmul": "F.matmul(x, y), or x @ y",
    "mm": "F.matmul(x, y), or x @ y",
    "chunk": "F.split_axis(x, sections, axis)",
    "split": "F.split_axis(x, indices, axis)",
    "astype": "F.cast(x, dtype)",
    "copy": "F.copy(x, -1), or x.array.copy()",
    "var": "F.mean and F.square, or x.array.var()",
    "std": "x.array.std()",
    "sum_": "F.sum(x)",
    "gather": "F.select_item(x, t)",
    "topk": "x.array.argsort()",
    "norm": "F.sqrt(F.sum(x * x))",
}
_ITERATOR = {
    "shuffle": "SerialIterator(dataset, batch_size, shuffle=...)",
    "batch": "SerialIterator(dataset, batch_size)",
    "sampler": "order_sampler",
    "set_epoch": "nothing: each epoch has its own order",
}
_DATASET = {
    "map": "dbrdist.datasets.TransformDataset(dataset, transform)",
    "batch": "dbrdist.iterators.SerialIterator(dataset, batch_size)",
    "shuffle": "dbrdist.iterators.SerialIterator(dataset, batch_size, shuffle=True)",
    "targets": "[t for _, t in dataset]",
    "filter": "dbrdist.datasets.SubDataset",
}
# By the class whose attributes these are: each is an AttributeError with our name in it.
OF_OBJECTS = {
    "Link": _LINK,
    "Optimizer": _OPTIMIZER,
    "Variable": _VARIABLE,
    "Iterator": _ITERATOR,
    "DatasetMixin": _DATASET,
}

_FUNCTIONS = {
    "cross_entropy": "F.softmax_cross_entropy(y, t)",
    "nll_loss": "F.softmax_cross_entropy(y, t), which takes what comes before log_softmax",
    "binary_cross_entropy": "F.bernoulli_nll(t, y), or F.sigmoid_cross_entropy(y, t) for what comes before sigmoid",
    "binary_cross_entropy_with_logits": "F.sigmoid_cross_entropy(y, t)",
    "mse_loss": "F.mean_squared_error(y, t)",
    "l1_loss": "F.mean_absolute_error(y, t)",
    "smooth_l1_loss": "F.huber_loss(y, t, 1.0)",
    "kl_div": "dbrdist.kl_divergence(p, q)",
    "triplet_margin_loss": "F.triplet(anchor, positive, negative)",
    "ctc_loss": "F.connectionist_temporal_classification",
    "max_pool1d": "F.max_pooling_1d(x, ksize)",
    "max_pool2d": "F.max_pooling_2d(x, ksize)",
    "max_pool3d": "F.max_pooling_3d(x, ksize)",
    "avg_pool1d": "F.average_pooling_1d(x, ksize)",
    "avg_pool2d": "F.average_pooling_2d(x, ksize)",
    "avg_pool3d": "F.average_pooling_3d(x, ksize)",
    "adaptive_avg_pool2d": "F.global_average_pooling_2d(x) for one value per channel",
    "conv1d": "F.convolution_1d(x, W, b)",
    "conv2d": "F.convolution_2d(x, W, b)",
    "conv3d": "F.convolution_3d(x, W, b)",
    "conv_transpose2d": "F.deconvolution_2d(x, W, b)",
    "batch_norm": "F.batch_normalization(x, gamma, beta)",
    "layer_norm": "F.layer_normalization(x, gamma, beta)",
    "group_norm": "F.group_normalization(x, groups, gamma, beta)",
    "embedding": "F.embed_id(x, W)",
    "one_hot": "numpy.eye(num_classes)[t]",
    "interpolate": "F.resize_images(x, (height, width))",
    "upsample": "F.resize_images(x, (height, width))",
    "unfold": "F.im2col(x, ksize)",
    "pixel_shuffle": "F.depth2space(x, r)",
    "grid_sample": "F.spatial_transformer_sampler(x, grid)",
    "affine_grid": "F.spatial_transformer_grid(theta, (height, width))",
    "cat": "F.concat(xs, axis)",
    "view": "F.reshape(x, shape)",
    "permute": "F.transpose(x, axes)",
    "unsqueeze": "F.expand_dims(x, axis)",
    "chunk": "F.split_axis(x, sections, axis)",
    "split": "F.split_axis(x, indices, axis)",
    "clamp": "F.clip(x, x_min, x_max)",
    "abs": "F.absolute(x)",
    "pow": "x ** p",
    "mm": "F.matmul(x, y)",
    "bmm": "F.matmul(x, y)",
    "gather": "F.select_item(x, t)",
    "alpha_dropout": "F.dropout(x, ratio)",
    "multi_head_attention_forward": "F.multi_head_attention",
}  # fmt: skip
_LINKS = {
    "Module": "dbrdist.Chain",
    "ModuleList": "dbrdist.ChainList(*links)",
    "ModuleDict": "dbrdist.Chain(**links)",
    "Sequential": "dbrdist.Sequential(*layers)",
    "Conv1d": "L.Convolution1D(in_channels, out_channels, ksize)",
    "Conv2d": "L.Convolution2D(in_channels, out_channels, ksize)",
    "Conv2D": "L.Convolution2D(in_channels, out_channels, ksize)",
    "Conv3d": "L.Convolution3D(in_channels, out_channels, ksize)",
    "ConvTranspose2d": "L.Deconvolution2D(in_channels, out_channels, ksize)",
    "LazyLinear": "L.Linear(None, out_size)",
    "Dense": "L.Linear(None, out_size)",
    "BatchNorm1d": "L.BatchNormalization(size)",
    "BatchNorm2d": "L.BatchNormalization(size)",
    "BatchNorm3d": "L.BatchNormalization(size)",
    "LayerNorm": "L.LayerNormalization(size)",
    "GroupNorm": "L.GroupNormalization(groups)",
    "RMSNorm": "L.RMSNormalization(size)",
    "Embedding": "L.EmbedID(in_size, out_size)",
    "MultiheadAttention": "L.MultiHeadAttention(width, heads)",
    "TransformerEncoderLayer": "L.TransformerBlock(width, heads)",
    "RNN": "L.NStepRNNTanh(n_layers, in_size, out_size, dropout)",
    "LSTMCell": "L.StatelessLSTM(in_size, out_size)",
    "GRUCell": "L.StatelessGRU(in_size, out_size)",
    "ReLU": "F.relu, a function: dbrdist.Sequential takes it as a layer",
    "LeakyReLU": "F.leaky_relu, a function",
    "GELU": "F.gelu, a function",
    "Sigmoid": "F.sigmoid, a function",
    "Tanh": "F.tanh, a function",
    "Softmax": "F.softmax, a function",
    "LogSoftmax": "F.log_softmax, a function",
    "Dropout": "F.dropout(x, ratio), a function",
    "Flatten": "nothing: L.Linear flattens by itself; F.flatten and F.reshape",
    "Identity": "F.identity, a function",
    "MaxPool2d": "F.max_pooling_2d(x, ksize), a function",
    "AvgPool2d": "F.average_pooling_2d(x, ksize), a function",
    "AdaptiveAvgPool2d": "F.global_average_pooling_2d, a function",
    "Upsample": "F.resize_images, a function",
    "CrossEntropyLoss": "F.softmax_cross_entropy, a function",
    "NLLLoss": "F.softmax_cross_entropy, a function",
    "BCELoss": "F.bernoulli_nll, a function",
    "BCEWithLogitsLoss": "F.sigmoid_cross_entropy, a function",
    "MSELoss": "F.mean_squared_error, a function",
    "L1Loss": "F.mean_absolute_error, a function",
    "functional": "dbrdist.functions",
    "init": "dbrdist.initializers",
}  # fmt: skip
_OPTIMIZERS = {
    "Adagrad": "optimizers.AdaGrad",
    "Adadelta": "optimizers.AdaDelta",
    "AMSgrad": "optimizers.AMSGrad",
    "RMSProp": "optimizers.RMSprop",
    "Momentum": "optimizers.MomentumSGD",
    "NAG": "optimizers.NesterovAG",
    "Nesterov": "optimizers.NesterovAG",
    "lr_scheduler": "dbrdist.training.extensions.FollowSchedule with dbrdist.optimizers.schedules",
    "StepLR": "dbrdist.training.extensions.StepShift('lr', gamma, step)",
    "CosineAnnealingLR": "FollowSchedule(dbrdist.optimizers.schedules.cosine(lr, epochs))",
    "ClipGradNorm": "optimizers.GradientClipping(threshold), a hook",
}
_ITERATORS = {
    "DataLoader": "dbrdist.iterators.SerialIterator(dataset, batch_size), or MultiprocessIterator",
    "DistributedSampler": "dbrdist.iterators.SerialIterator(dataset, batch_size, rank=comm.rank, size=comm.size)",
    "RandomSampler": "shuffle=True of dbrdist.iterators.SerialIterator",
    "SequentialSampler": "shuffle=False of dbrdist.iterators.SerialIterator",
}
_DATASETS = {
    **_ITERATORS,
    "Dataset": "dbrdist.dataset.DatasetMixin, or any object with __len__ and __getitem__",
    "TensorDataset": "dbrdist.datasets.TupleDataset(*arrays)",
    "ConcatDataset": "dbrdist.datasets.ConcatenatedDataset(*datasets)",
    "Subset": "dbrdist.datasets.SubDataset",
    "random_split": "dbrdist.datasets.split_dataset_random(dataset, first_size)",
    "MNIST": "dbrdist.datasets.get_mnist()",
    "FashionMNIST": "dbrdist.datasets.get_fashion_mnist()",
    "CIFAR10": "dbrdist.datasets.get_cifar10()",
    "CIFAR100": "dbrdist.datasets.get_cifar100()",
    "default_collate": "dbrdist.dataset.concat_examples(batch)",
    "ToTensor": "dbrdist.datasets.ToCHW",
    "RandomFlip": "dbrdist.datasets.RandomHorizontalFlip",
}
_EXTENSIONS = {
    "ModelCheckpoint": "extensions.snapshot(trigger=...), with triggers.MaxValueTrigger for the best",
    "EarlyStopping": "the stop trigger dbrdist.training.triggers.EarlyStoppingTrigger",
    "LearningRateMonitor": "extensions.observe_lr()",
    "TQDMProgressBar": "extensions.ProgressBar()",
    "CSVLogger": "extensions.LogReport()",
    "SummaryWriter": "extensions.TensorBoard()",
}
_ROOT = {
    "nn": "dbrdist.links (with dbrdist.Chain for nn.Module), and dbrdist.functions",
    "optim": "dbrdist.optimizers",
    "no_grad": "dbrdist.no_backprop_mode()",
    "inference_mode": "dbrdist.no_backprop_mode()",
    "enable_grad": "dbrdist.force_backprop_mode()",
    "set_grad_enabled": "dbrdist.using_config('enable_backprop', ...)",
    "tensor": "dbrdist.Variable(array)",
    "Tensor": "dbrdist.Variable",
    "from_numpy": "dbrdist.Variable(array)",
    "as_tensor": "dbrdist.as_variable(array)",
    "zeros": "numpy.zeros, or dbrdist.Variable(numpy.zeros(shape, 'float32'))",
    "ones": "numpy.ones, or dbrdist.Variable(numpy.ones(shape, 'float32'))",
    "randn": "numpy.random.randn",
    "rand": "numpy.random.rand",
    "arange": "numpy.arange",
    "float32": "numpy.float32",
    "float64": "numpy.float64",
    "long": "numpy.int64",
    "device": "dbrdist.get_device('@numpy') or dbrdist.get_device('@cupy:0')",
    "manual_seed": "dbrdist.random.set_seed(seed)",
    "save": "dbrdist.serializers.save_npz(file, link)",
    "cuda": "dbrdist.backends.cuda",
    "distributed": "dbrdist.comm",
    "autograd": "dbrdist.FunctionNode, dbrdist.grad and dbrdist.backward",
    "Module": "dbrdist.Chain",
    "Trainer": "dbrdist.training.Trainer",
    "compile": "nothing: functions are fused as they run",
    "cat": "dbrdist.functions.concat(xs, axis)",
    "stack": "dbrdist.functions.stack(xs)",
    "matmul": "dbrdist.functions.matmul(x, y)",
    **_ITERATORS,
}  # fmt: skip
_COMM = {
    "init_process_group": "comm = dbrdist.comm.create_communicator()",
    "get_rank": "comm.rank",
    "get_world_size": "comm.size",
    "all_reduce": "comm.allreduce(array)",
    "barrier": "comm.barrier()",
    "broadcast": "comm.bcast(array)",
    "DistributedDataParallel": "create_multi_node_optimizer(optimizer, comm)",
    "DistributedSampler": _ITERATORS["DistributedSampler"],
}
# By module; ours and Chainer's have the same path behind the first name.
_OF_MODULES = {
    "": _ROOT,
    ".functions": _FUNCTIONS,
    ".links": _LINKS,
    ".optimizers": _OPTIMIZERS,
    ".datasets": _DATASETS,
    ".dataset": _DATASETS,
    ".iterators": _DATASETS,
    ".training": {**_EXTENSIONS, **_OPTIMIZERS},
    ".training.extensions": {**_EXTENSIONS, **_OPTIMIZERS},
    ".training.triggers": _EXTENSIONS,
    ".comm": _COMM,
}

# Arguments: what comes first among those that a function has is meant; a text with a blank is said as it is.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "kernel_size": ("ksize",),
    "filter_size": ("ksize",),
    "kernel": ("ksize",),
    "padding": ("pad",),
    "strides": ("stride",),
    "dilation": ("dilate",),
    "group": ("groups",),
    "num_groups": ("groups",),
    "in_features": ("in_size",),
    "out_features": ("out_size",),
    "in_channels": ("in_channels", "in_size", "size"),
    "out_channels": ("out_channels", "out_size"),
    "in_dim": ("in_size", "in_channels"),
    "out_dim": ("out_size", "out_channels"),
    "input_size": ("in_size",),
    "hidden_size": ("out_size", "n_units"),
    "output_size": ("out_size", "outsize"),
    "units": ("out_size",),
    "filters": ("out_channels",),
    "num_layers": ("n_layers",),
    "num_features": ("size",),
    "normalized_shape": ("size",),
    "num_channels": ("size", "in_channels"),
    "num_embeddings": ("in_size",),
    "embedding_dim": ("out_size",),
    "embed_dim": ("width", "size"),
    "num_heads": ("heads", "n_heads", "num_heads"),
    "padding_idx": ("ignore_label",),
    "ignore_index": ("ignore_label",),
    "weight": ("class_weight", "W", "initialW"),
    "bias": ("nobias", "b"),
    "affine": ("use_gamma",),
    "training": ("nothing: dropout and others follow dbrdist.using_config('train', ...)",),
    "train": ("nothing: dropout and others follow dbrdist.using_config('train', ...)",),
    "p": ("ratio", "dropout", "dropout_ratio", "rate"),
    "dropout": ("dropout", "dropout_ratio", "ratio"),
    "dim": ("axis",),
    "keepdim": ("keepdims",),
    "reduction": ("reduce",),
    "negative_slope": ("slope",),
    "ceil_mode": ("cover_all",),
    "beta": ("beta", "beta1"),
    "betas": ("beta1 and beta2",),
    "lr": ("lr", "alpha"),
    "learning_rate": ("lr", "alpha"),
    "rho": ("rho", "alpha", "decay"),
    "epsilon": ("eps",),
    "decay": ("weight_decay_rate", "rate"),
    "weight_decay": ("weight_decay_rate", "optimizer.add_hook(WeightDecay(rate))"),
    "momentum": ("momentum", "decay", "the optimizer MomentumSGD"),
    "nesterov": ("the optimizer NesterovAG",),
    "params": ("optimizer.setup(link) instead",),
    "max_norm": ("threshold",),
    "clip": ("threshold",),
    "inplace": ("nothing: leave inplace out",),
    "num_workers": ("n_processes", "n_threads", "iterators.MultiprocessIterator(..., n_processes=...)"),
    "workers": ("n_processes", "n_threads"),
    "drop_last": ("last='drop'",),
    "sampler": ("order_sampler",),
    "batch": ("batch_size",),
    "batchsize": ("batch_size",),
    "collate_fn": ("converter", "converter= of the updater"),
    "pin_memory": ("nothing: leave pin_memory out",),
    "epochs": ("stop_trigger=(epochs, 'epoch')",),
    "max_epochs": ("stop_trigger=(epochs, 'epoch')",),
    "model": ("optimizer", "target", "predictor"),
    "output": ("out",),
    "loss": ("loss_func", "lossfun", "init"),
    "lossfun": ("loss_func", "lossfun"),
    "loss_fn": ("loss_func", "lossfun"),
    "loss_func": ("lossfun", "loss_func"),
    "criterion": ("loss_func", "lossfun"),
    "dataset": ("iterator",),
    "train_iter": ("iterator",),
    "monitor": ("key",),
    "metric": ("key",),
    "invoke_before_training": ("call_before_training",),
    "size_average": ("normalize", "reduce"),
    "init": ("initialW",),
    "initial_weight": ("initialW",),
    "activation": ("activation", "activ", "a function behind the link: F.relu(link(x))"),
}  # fmt: skip


def hint(module: str, name: str) -> str:
    """What to write for a name of PyTorch that the module (`.functions`, without its first name) lacks, or nothing."""
    table = _OF_MODULES.get(module)
    while table is None and module:
        module = module.rpartition(".")[0]
        table = _OF_MODULES.get(module)
    ours = (table or {}).get(name)
    return "" if ours is None else f"{name} is PyTorch's name; write {ours}"


class Foreign:
    """An attribute that a class lacks: reading it says what to write."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, obj: Any, owner: type) -> Any:
        words = f"{owner.__name__!r} object has no attribute {self._name!r}; write {self._ours}"
        raise AttributeError(words, name=self._name)


class UnknownSetting(Foreign):
    """A hyperparameter that an optimizer lacks: assigning it would change nothing, and warns."""

    def __get__(self, obj: Any, owner: type) -> Any:
        if obj is not None and self._name in obj.__dict__:
            return obj.__dict__[self._name]
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}{self._hint(owner)}", name=self._name
        )

    def __set__(self, obj: Any, value: Any) -> None:
        cls = type(obj)
        if cls.__module__.startswith("dbrdist.") and self._name not in obj.__dict__:  # a user's class may have it
            words = f"{cls.__name__} has no hyperparameter {self._name!r}, so that setting it changes nothing"
            warn(f"{words}{self._hint(cls)}")
        obj.__dict__[self._name] = value

    def __delete__(self, obj: Any) -> None:
        del obj.__dict__[self._name]

    def _hint(self, owner: type) -> str:
        known = [name for name in _SETTINGS if not isinstance(getattr_static(owner, name, self), Foreign)]
        meant = next(
            (ours for ours in _ARGUMENTS.get(self._name, ()) if ours in known or not ours.isidentifier()), None
        )
        if meant is not None:
            return f"; did you mean {meant!r}?" if meant in known else f"; write {meant}"
        return f"; it has {', '.join(known)}" if known else ""


_SETTINGS = (
    "lr", "alpha", "momentum", "beta1", "beta2", "betas", "eps", "rho", "eta", "gamma", "weight_decay_rate",
    "learning_rate", "weight_decay", "decay", "epsilon", "nesterov", "clip", "amsgrad",
)  # fmt: skip


def add_settings(cls: type) -> None:
    """Let the class of all optimizers warn of hyperparameters that are assigned and that it lacks."""
    for name in _SETTINGS:
        if not hasattr(cls, name):
            foreign = UnknownSetting("")
            foreign.__set_name__(cls, name)
            setattr(cls, name, foreign)


def add_hints(cls: type, kind: str) -> None:
    """Let a class explain the names of PyTorch that it and its bases lack; an attribute of an instance goes first."""
    for name, ours in OF_OBJECTS[kind].items():
        if not hasattr(cls, name):
            foreign = Foreign(ours)
            foreign.__set_name__(cls, name)
            setattr(cls, name, foreign)


def explained_arguments(
    name: str, function: Callable[..., Any], error: TypeError, given: Mapping[str, Any], is_direct: bool = False
) -> str | None:
    """Words for a call that failed because the function has no such argument; None for any other error."""
    trace = error.__traceback__
    if not is_direct and (trace is None or trace.tb_next is not None):  # raised within the function
        return None
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    unknown = [key for key in given if key not in parameters]
    if not unknown:
        return None
    return f"{name}() got an unexpected keyword argument {unknown[0]!r}{_meant(unknown[0], list(parameters))}"


class UnknownArgumentError(TypeError, ValueError):
    """A keyword argument that a function does not take; Chainer raises ValueError where it took it once."""


def refuse_unknown(name: str, function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Raise for keyword arguments left over in a function that takes any: what its signature has is known."""
    if unknown:
        known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        raise UnknownArgumentError(
            f"{name}() got unknown arguments: {', '.join(unknown)}{_meant(next(iter(unknown)), known)}"
        )


def _meant(argument: str, parameters: list[str]) -> str:
    known = [p for p in parameters if p != "self"]
    for ours in _ARGUMENTS.get(argument, ()):
        if ours in known or not ours.isidentifier():
            return f"; did you mean {ours!r}?" if ours in known else f"; write {ours}"
    close = difflib.get_close_matches(argument.lower(), {p.lower(): p for p in known}, 1)
    if close:
        return f"; did you mean {next(p for p in known if p.lower() == close[0])!r}?"
    return f"; it takes {', '.join(known) or 'no arguments'}"
