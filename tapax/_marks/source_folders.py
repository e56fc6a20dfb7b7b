"""The folders of JAX and of tapax, whose files are not the user's."""

import os

import jax

JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
TAPAX_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
