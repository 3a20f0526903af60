"""What a trainer can do between steps."""

from dbrdist.core.names.constructors import explain_constructors as _explain_constructors
from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.training.extensions import snapshot_writers as snapshot_writers
from dbrdist.training.extensions.computational_graph import DumpGraph as DumpGraph
from dbrdist.training.extensions.computational_graph import dump_graph as dump_graph
from dbrdist.training.extensions.evaluator import Evaluator as Evaluator
from dbrdist.training.extensions.log_report import LogReport as LogReport
from dbrdist.training.extensions.log_report import PrintReport as PrintReport
from dbrdist.training.extensions.loggers import CSVLogger as CSVLogger
from dbrdist.training.extensions.loggers import MetricsLogger as MetricsLogger
from dbrdist.training.extensions.loggers import MLflowLogger as MLflowLogger
from dbrdist.training.extensions.loggers import WandbLogger as WandbLogger
from dbrdist.training.extensions.micro_average import MicroAverage as MicroAverage
from dbrdist.training.extensions.observe import FailOnNonNumber as FailOnNonNumber
from dbrdist.training.extensions.observe import observe_lr as observe_lr
from dbrdist.training.extensions.observe import observe_value as observe_value
from dbrdist.training.extensions.observe import unchain_variables as unchain_variables
from dbrdist.training.extensions.parameter_statistics import ParameterStatistics as ParameterStatistics
from dbrdist.training.extensions.plot_report import PlotReport as PlotReport
from dbrdist.training.extensions.print_report_notebook import PrintReportNotebook as PrintReportNotebook
from dbrdist.training.extensions.progress_bar import ProgressBar as ProgressBar
from dbrdist.training.extensions.shifts import ExponentialShift as ExponentialShift
from dbrdist.training.extensions.shifts import FollowSchedule as FollowSchedule
from dbrdist.training.extensions.shifts import InverseShift as InverseShift
from dbrdist.training.extensions.shifts import LinearShift as LinearShift
from dbrdist.training.extensions.shifts import MultistepShift as MultistepShift
from dbrdist.training.extensions.shifts import PolynomialShift as PolynomialShift
from dbrdist.training.extensions.shifts import StepShift as StepShift
from dbrdist.training.extensions.shifts import WarmupShift as WarmupShift
from dbrdist.training.extensions.snapshots import Snapshot as Snapshot
from dbrdist.training.extensions.snapshots import snapshot as snapshot
from dbrdist.training.extensions.snapshots import snapshot_object as snapshot_object
from dbrdist.training.extensions.tensorboard import TensorBoard as TensorBoard
from dbrdist.training.extensions.variable_statistics_plot import VariableStatisticsPlot as VariableStatisticsPlot
from dbrdist.training.extensions.weight_average import WeightAverage as WeightAverage

_explain_constructors(globals())
__getattr__ = _explained(__name__)
