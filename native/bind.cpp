// The Python face of the native module. Tensors cross as (address, dtype name, shape) or None: nanobind arrays would be
// copied silently when dtype or order do not match, and an output written to the copy is lost.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "dtype.h"
#include "isa.h"
#include "program.h"
#include "rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace genai {
namespace {

char nothing[64];  // where zero-size tensors point: a null address means a missing input

Tensor tensor_from(nb::handle value) {
  if (value.is_none()) return {};
  auto [address, dtype, shape] = nb::cast<std::tuple<uintptr_t, std::string, std::vector<int64_t>>>(value);
  Tensor tensor{reinterpret_cast<void*>(address), dtype_from(dtype), shape};
  for (int64_t dim : shape) {
    if (dim < 0) throw std::invalid_argument("a dimension of " + describe(shape) + " is negative");
  }
  if (!tensor.data && tensor.size() == 0) tensor.data = nothing;
  if (!tensor.data) throw std::invalid_argument("tensor " + describe(tensor.shape) + " has no address");
  return tensor;
}

std::vector<Tensor> tensors_from(nb::sequence values) {
  std::vector<Tensor> tensors;
  for (nb::handle value : values) tensors.push_back(tensor_from(value));
  return tensors;
}

bool is_integer(nb::handle value) { return PyLong_Check(value.ptr()); }  // bool included
bool is_number(nb::handle value) { return is_integer(value) || PyFloat_Check(value.ptr()); }

Attr list_from(nb::handle values) {
  std::vector<int64_t> integers;
  std::vector<double> reals;
  bool whole = true;
  for (nb::handle item : values) {
    if (!is_number(item)) throw std::invalid_argument("is a list of something else than numbers");
    whole = whole && is_integer(item);
    reals.push_back(nb::cast<double>(item));
    if (whole) integers.push_back(nb::cast<int64_t>(item));
  }
  return whole ? Attr(integers) : Attr(reals);
}

Attr attr_from(nb::handle value) {
  if (PyLong_Check(value.ptr())) return nb::cast<int64_t>(value);
  if (PyFloat_Check(value.ptr())) return nb::cast<double>(value);
  if (nb::isinstance<nb::str>(value)) return nb::cast<std::string>(value);
  if (nb::isinstance<nb::bytes>(value)) return std::string(nb::cast<nb::bytes>(value).c_str());
  if (nb::hasattr(value, "tolist")) return attr_from(value.attr("tolist")());  // numpy scalars and arrays
  if (nb::isinstance<nb::list>(value) || nb::isinstance<nb::tuple>(value)) return list_from(value);
  throw std::invalid_argument("is neither a number, a string, nor a list of numbers");
}

std::map<std::string, Attr> attrs_from(nb::dict values) {
  std::map<std::string, Attr> attrs;
  for (auto [key, value] : values) {
    if (value.is_none()) continue;
    auto name = nb::cast<std::string>(key);
    try {
      attrs[name] = attr_from(value);
    } catch (const std::exception& error) {
      throw std::invalid_argument("attribute `" + name + "` " + error.what());
    }
  }
  return attrs;
}

size_t add_step(Program& program, const std::string& kernel, nb::sequence ins, nb::sequence outs, nb::dict attrs) {
  Args args;
  try {
    args = {tensors_from(ins), tensors_from(outs), attrs_from(attrs)};
  } catch (const nb::cast_error&) {
    throw std::invalid_argument(kernel + ": a tensor is (address, dtype, shape) or None");
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(kernel + ": " + error.what());
  }
  return program.add(kernel, std::move(args));
}

std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> take_spans(Program& program) {
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> rows;
  for (const auto& span : program.take_spans()) rows.emplace_back(span.step, span.start_ns, span.end_ns);
  return rows;
}

KvBuffer& buffer_at(Sequence& sequence, size_t index) {
  if (index >= sequence.kv.size()) throw std::out_of_range("no KV slot " + std::to_string(index));
  return sequence.kv[index];
}

void copy_rows_at(uintptr_t to, int64_t to_head, int64_t to_row, uintptr_t from, int64_t from_head, int64_t from_row,
                  int64_t num_heads, int64_t num_rows, int64_t row_bytes) {
  nb::gil_scoped_release release;
  copy_rows({reinterpret_cast<char*>(to), to_head, to_row}, {reinterpret_cast<char*>(from), from_head, from_row},
            num_heads, num_rows, row_bytes);
}

}  // namespace
}  // namespace genai

NB_MODULE(_native, m) {
  using namespace genai;
  nb::set_leak_warnings(false);  // an interpreter that exits through an exception leaks by nature

  m.def("isas", &supported_isas, "Instruction sets compiled in and runnable here, lowest first.");
  m.def("kernels", &kernel_names, "isa"_a, "Names of the kernels compiled for an instruction set.");
  m.def(
      "copy_table",
      [](uintptr_t lines, int64_t count) {
        nb::gil_scoped_release release;
        copy_table(reinterpret_cast<const CopyLine*>(lines), count);
      },
      "lines"_a, "count"_a);
  m.def("copy_rows", &copy_rows_at, "to"_a, "to_head_stride"_a, "to_row_stride"_a, "from_"_a, "from_head_stride"_a,
        "from_row_stride"_a, "num_heads"_a, "num_rows"_a, "row_bytes"_a,
        "Copy [num_heads, num_rows] rows; strides in bytes.");

  nb::class_<ThreadPool>(m, "ThreadPool").def(nb::init<int>(), "num_threads"_a).def_prop_ro("size", &ThreadPool::size);

  nb::class_<Sequence>(m, "Sequence")
      .def(nb::init<>())
      .def_rw("past_len", &Sequence::past_len)
      .def(
          "add_slot",
          [](Sequence& sequence, int64_t num_heads, int64_t head_dim, const std::string& dtype) {
            sequence.kv.push_back({nullptr, 0, num_heads, head_dim, dtype_from(dtype)});
            return sequence.kv.size() - 1;
          },
          "num_heads"_a, "head_dim"_a, "dtype"_a)
      .def(
          "set_slot",
          [](Sequence& sequence, size_t index, uintptr_t address, int64_t capacity) {
            KvBuffer& buffer = buffer_at(sequence, index);
            buffer.data = reinterpret_cast<void*>(address);
            buffer.capacity = capacity;
          },
          "index"_a, "address"_a, "capacity"_a);

  nb::class_<State>(m, "State")
      .def(nb::init<>())
      .def_rw("now", &State::now, "The sequence whose next tokens a step takes.")
      .def_rw("rows", &State::rows, "Not empty: token r of a step is the next one of rows[r].");

  nb::class_<Program>(m, "Program")
      .def(nb::init<std::string, std::shared_ptr<ThreadPool>, std::shared_ptr<State>>(), "isa"_a, "pool"_a, "state"_a)
      .def("add", &add_step, "kernel"_a, "inputs"_a, "outputs"_a, "attrs"_a)
      .def("run", &Program::run, "first"_a, "last"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("profile", &Program::set_profiling, "on"_a)
      .def("take_spans", &take_spans)
      .def("__len__", &Program::size);
}
