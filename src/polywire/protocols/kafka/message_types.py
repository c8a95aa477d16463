"""The types of all messages, for the type checker only: ``message_types.pyi`` declares them.

This module is empty at run time, where ``schema`` compiles the types on first use. Import it under ``TYPE_CHECKING``.
"""
