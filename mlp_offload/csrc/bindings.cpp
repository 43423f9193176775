// The Python module mlp_offload._native: the only place where C++ meets Python.
// Addresses cross as integers, sizes in bytes; no torch headers, so one build serves every torch release.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "adam/kernel.h"

namespace py = pybind11;

// ---------------------------------------------------------------------------------------------- io
static void bind_io(py::module_& m) { (void)m; }

// -------------------------------------------------------------------------------------------- adam
template <class Row, class Element>
static const Row* rows_of(const py::array_t<Element, py::array::c_style>& array, int columns, const char* name) {
  if (array.ndim() != 2 || array.shape(1) != columns) {
    throw std::invalid_argument(std::string(name) + " must have " + std::to_string(columns) + " columns");
  }
  return reinterpret_cast<const Row*>(array.data());
}

static void bind_adam(py::module_& m) {
  namespace adam = mlp_offload::adam;
  using Segments = py::array_t<std::int64_t, py::array::c_style>;
  using Groups = py::array_t<float, py::array::c_style>;
  m.def("adam_variants", &adam::variants, "Names of the Adam variants that this processor runs, fastest first.");
  py::class_<adam::AdamKernel>(m, "AdamKernel")
      .def(py::init<int, const std::string&>(), py::arg("threads"), py::arg("variant"))
      .def(
          "update",
          [](adam::AdamKernel& kernel, std::uint64_t state_address, std::int64_t stride_numel, const Segments& segments,
             const Groups& groups) {
            const auto* segment_rows = rows_of<adam::Segment>(segments, adam::kSegmentColumnCount, "segments");
            const auto* group_rows = rows_of<adam::Scalars>(groups, adam::kScalarCount, "groups");
            const std::int64_t segment_count = segments.shape(0), group_count = groups.shape(0);
            py::gil_scoped_release release;
            kernel.update(state_address, stride_numel, segment_rows, segment_count, group_rows, group_count);
          },
          py::arg("state_address"), py::arg("stride_numel"), py::arg("segments").noconvert(),
          py::arg("groups").noconvert())
      .def("close", &adam::AdamKernel::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("threads", &adam::AdamKernel::threads)
      .def_property_readonly("variant", &adam::AdamKernel::variant);
}

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native engines of mlp_offload: storage I/O and the Adam kernel.";
  bind_io(m);
  bind_adam(m);
}
