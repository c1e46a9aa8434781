# What type checkers and editors read instead of the lazy names of __init__.py.
from segapp import errors as errors
from segapp import losses as losses
from segapp import memory as memory
from segapp import metrics as metrics
from segapp import parallel as parallel
from segapp import precision as precision
from segapp.api import Network as Network
from segapp.api import StopTraining as StopTraining
from segapp.api import evaluate as evaluate
from segapp.api import history as history
from segapp.api import load as load
from segapp.api import predict as predict
from segapp.api import train as train
from segapp.config import RunConfig as RunConfig
from segapp.results import EvalResult as EvalResult
from segapp.results import Evaluated as Evaluated
from segapp.results import History as History
from segapp.results import PredictResult as PredictResult
from segapp.results import TrainResult as TrainResult
from segapp.run.events import Event as Event

__version__: str
