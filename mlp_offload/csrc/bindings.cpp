// The Python module mlp_offload._native: the only place where C++ meets Python.
// Addresses cross as integers, sizes in bytes; no torch headers, so one build serves every torch release.
#include <pybind11/pybind11.h>

namespace py = pybind11;

// ---------------------------------------------------------------------------------------------- io
static void bind_io(py::module_& m) { (void)m; }

// -------------------------------------------------------------------------------------------- adam
static void bind_adam(py::module_& m) { (void)m; }

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native engines of mlp_offload: storage I/O and the Adam kernel.";
  bind_io(m);
  bind_adam(m);
}
