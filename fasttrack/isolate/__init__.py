"""Blast radius of a change: files inside and outside the declared paths, and what reaches further than its file.

``diff`` reads unified diffs, ``source`` finds the two versions of a file, ``facts`` and ``python`` compare what Python
code does to its surroundings, ``dependencies`` and ``layout`` know requirement files and shared components, ``run``
puts it together, ``report`` prints it. Nothing of the change is imported or run.
"""
