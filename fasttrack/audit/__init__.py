"""Static audit of compiled kernels: synchronisation faults that functional tests pass. Needs no GPU and no CUDA.

PTX text (``ptx_text``, ``ptx_lower``, ``ptx_memory``) and SASS (``cubin``, ``sass_lower``) become one form (``ir``).
``flow`` knows paths, loops and definitions, ``trace`` which parameter an address comes from, ``order`` what can run
before ``griddepcontrol.wait``. ``check_order``, ``check_poll``, ``check_proxy`` and ``schedule`` apply the ``rules``;
``contracts`` say what each parameter is and which findings are accepted, ``unit`` and ``run`` drive it, ``output``
writes text, JSON and SARIF.

A contract accepts a finding with an exception that names rule, parameter ('' when the rule has none) and reason. It is
looked at again in every audit: one that accepts nothing is itself a finding.
"""
