"""Language models: training, scoring, sampling, and the policies over them."""

import logging

# transformers imports torchao wherever it is installed, which tells of its parts for devices that are not there.
logging.getLogger("torchao").setLevel(logging.ERROR)
