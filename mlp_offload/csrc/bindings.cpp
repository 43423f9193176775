// The Python module mlp_offload._native: the only place where C++ meets Python.
// Addresses cross as integers, sizes in bytes; no torch headers, so one build serves every torch release.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "adam/kernel.h"
#include "io/alignment.h"
#include "io/crc32c.h"
#include "io/engine.h"

namespace py = pybind11;

// ---------------------------------------------------------------------------------------------- io
namespace {

using mlp_offload::io::Engine;
using mlp_offload::io::Operation;
using mlp_offload::io::Request;
using mlp_offload::io::RequestPtr;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// Frees an engine (which waits for its threads) with the GIL released.
struct EngineDeleter {
  void operator()(Engine* engine) const {
    py::gil_scoped_release unlocked;
    delete engine;
  }
};

template <Operation operation>
RequestPtr submit(Engine& engine, uint64_t offset, uintptr_t address, uint64_t nbytes, bool checksum) {
  return engine.submit(operation, offset, reinterpret_cast<char*>(address), nbytes, checksum);
}

// Waits in slices, so that a signal handler of Python (Ctrl-C) runs meanwhile.
bool wait(const Request& request, double timeout_seconds) {
  constexpr double kSliceSeconds = 0.2;
  const auto deadline = mlp_offload::io::deadline_after(timeout_seconds);
  while (true) {
    const std::chrono::duration<double> left = deadline - std::chrono::steady_clock::now();
    const double slice = timeout_seconds < 0 ? kSliceSeconds : std::clamp(left.count(), 0.0, kSliceSeconds);
    {
      py::gil_scoped_release unlocked;
      if (request.wait(slice)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (timeout_seconds >= 0 && left.count() <= kSliceSeconds) return false;
  }
}

py::list in_flight(const Engine& engine) {
  py::list list;
  for (const auto& item : engine.in_flight())
    list.append(py::make_tuple(name_of(item.operation), item.offset, item.nbytes, item.age_seconds));
  return list;
}

uint32_t crc32c_of(uintptr_t address, uint64_t nbytes, uint32_t initial) {
  return mlp_offload::io::crc32c(reinterpret_cast<const void*>(address), nbytes, initial);
}

uint32_t crc32c_portable_of(uintptr_t address, uint64_t nbytes, uint32_t initial) {
  return mlp_offload::io::crc32c_portable(reinterpret_cast<const void*>(address), nbytes, initial);
}

}  // namespace

static void bind_io(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const std::system_error& error) {
      py::object os_error = py::reinterpret_borrow<py::object>(PyExc_OSError)(error.code().value(), error.what());
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(os_error.ptr())), os_error.ptr());
    } catch (const std::logic_error& error) {
      if (dynamic_cast<const std::invalid_argument*>(&error) != nullptr) throw;
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  });

  py::class_<Request, RequestPtr>(m, "IoRequest", "A read or write under way. Dropping it does not stop it.")
      .def("done", &Request::done)
      .def("wait", &wait, py::arg("timeout_seconds"), "True once done; a negative timeout waits for ever.")
      .def_property_readonly("operation", [](const Request& r) { return name_of(r.operation); })
      .def_readonly("offset", &Request::offset)
      .def_readonly("nbytes", &Request::nbytes)
      .def_property_readonly("failed", &Request::failed)
      .def_property_readonly("error_number", &Request::error_number, "errno of the first block that failed, else 0.")
      .def_property_readonly("early_eof", &Request::early_eof, "A read met the end of the file.")
      .def_property_readonly("crc32c", &Request::crc32c, "Of the whole request; None without checksum or on failure.")
      .def_readonly("submitted_seconds", &Request::submitted_seconds, "Clock of time.monotonic().")
      .def_property_readonly("started_seconds", &Request::started_seconds, "Of the first block; 0.0 before.")
      .def_property_readonly("finished_seconds", &Request::finished_seconds, "0.0 before.");

  py::class_<Engine, std::unique_ptr<Engine, EngineDeleter>>(m, "IoEngine", "Asynchronous reads and writes on a file.")
      .def(py::init([](const std::string& kind, const std::string& path, bool direct, unsigned threads,
                       unsigned iodepth, uint64_t block_size, uint64_t alignment) {
             py::gil_scoped_release unlocked;
             return std::unique_ptr<Engine, EngineDeleter>(
                 new Engine(kind, {path, direct, threads, iodepth, block_size, alignment}));
           }),
           py::arg("kind"), py::arg("path"), py::arg("direct"), py::arg("threads"), py::arg("iodepth"),
           py::arg("block_size"), py::arg("alignment"))
      .def_readonly("kind", &Engine::kind)
      .def("read", &submit<Operation::read>, py::arg("offset"), py::arg("address"), py::arg("nbytes"),
           py::arg("checksum") = false, Unlocked())
      .def("write", &submit<Operation::write>, py::arg("offset"), py::arg("address"), py::arg("nbytes"),
           py::arg("checksum") = false, Unlocked())
      .def(
          "register_buffers",
          [](Engine& engine, uintptr_t address, uint64_t nbytes) {
            return engine.register_buffers(reinterpret_cast<char*>(address), nbytes);
          },
          py::arg("address"), py::arg("nbytes"), Unlocked(),
          "Pins a region for the kernel until close(); False where that cannot be had.")
      .def("inflight", &in_flight, "[(operation, offset, nbytes, age_seconds)] of what is not completed, oldest first.")
      .def("close", &Engine::close, py::arg("timeout_seconds"), Unlocked(),
           "Drops what has not started, waits for the rest; False if something is still stuck.");

  m.def("crc32c", &crc32c_of, py::arg("address"), py::arg("nbytes"), py::arg("initial") = 0, Unlocked());
  m.def("crc32c_portable", &crc32c_portable_of, py::arg("address"), py::arg("nbytes"), py::arg("initial") = 0,
        Unlocked(), "crc32c without processor-specific instructions.");
  m.def("crc32c_combine", &mlp_offload::io::crc32c_combine, py::arg("crc_a"), py::arg("crc_b"), py::arg("nbytes_b"));
  m.attr("io_uring_compiled") = mlp_offload::io::uring_compiled();
  m.def("io_uring_available", &mlp_offload::io::uring_available, Unlocked(), "(works, reason why not)");
  m.def(
      "direct_alignment",
      [](const std::string& path) -> std::optional<std::pair<uint32_t, uint32_t>> {
        const auto found = mlp_offload::io::direct_alignment(path);
        if (!found) return std::nullopt;
        return std::make_pair(found->memory_bytes, found->offset_bytes);
      },
      py::arg("path"), Unlocked(), "(memory, offset) alignment of direct I/O in bytes by statx; None: not told.");
}

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
  using Numbers = py::array_t<std::int64_t, py::array::c_style>;
  m.def("adam_variants", &adam::variants, "Names of the Adam variants that this processor runs, fastest first.");
  py::class_<adam::AdamKernel>(m, "AdamKernel")
      .def(py::init<int, const std::string&>(), py::arg("threads"), py::arg("variant"))
      .def(
          "update",
          [](adam::AdamKernel& kernel, std::uint64_t state_address, std::int64_t stride_numel,
             std::int64_t main_itemsize, const Segments& segments, const Groups& groups) {
            const auto* segment_rows = rows_of<adam::Segment>(segments, adam::kSegmentColumnCount, "segments");
            const auto* group_rows = rows_of<adam::Scalars>(groups, adam::kScalarCount, "groups");
            const std::int64_t segment_count = segments.shape(0), group_count = groups.shape(0);
            py::gil_scoped_release release;
            kernel.update(state_address, stride_numel, main_itemsize, segment_rows, segment_count, group_rows,
                          group_count);
          },
          py::arg("state_address"), py::arg("stride_numel"), py::arg("main_itemsize"),
          py::arg("segments").noconvert(), py::arg("groups").noconvert())
      .def(
          "sum_words",
          [](adam::AdamKernel& kernel, const Numbers& addresses, const Numbers& numels) {
            if (addresses.ndim() != 1 || numels.ndim() != 1 || addresses.size() != numels.size()) {
              throw std::invalid_argument("addresses and numels must be one-dimensional and equally long");
            }
            py::array_t<std::uint32_t> sums(addresses.size());
            const std::int64_t *address_data = addresses.data(), *numel_data = numels.data(), count = addresses.size();
            std::uint32_t* sum_data = sums.mutable_data();
            {
              py::gil_scoped_release release;
              kernel.sum_words(address_data, numel_data, count, sum_data);
            }
            return sums;
          },
          py::arg("addresses").noconvert(), py::arg("numels").noconvert())
      .def("close", &adam::AdamKernel::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("threads", &adam::AdamKernel::threads)
      .def_property_readonly("variant", &adam::AdamKernel::variant);
}

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native engines of mlp_offload: storage I/O and the Adam kernel.";
  bind_io(m);
  bind_adam(m);
}
