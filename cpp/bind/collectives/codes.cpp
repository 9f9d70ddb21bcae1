// The names of operations, ways to reduce, element types and failures, in the order of their numbers.
#include "codes.hpp"

namespace nb = nanobind;

namespace {

template <class Enum, class Of>
nb::tuple table(int count, Of of) {
  nb::list entries;
  for (int number = 0; number < count; ++number) entries.append(of(static_cast<Enum>(number)));
  return nb::tuple(entries);
}

}  // namespace

void bind_codes(nb::module_& m) {
  m.attr("OP_KINDS") = table<ff::OpKind>(ff::op_kind_count, ff::kind_name);
  m.attr("REDUCE_OPS") = table<ff::ReduceOp>(ff::reduce_op_count, ff::reduce_op_name);
  m.attr("DTYPES") = table<ff::DType>(ff::dtype_count, [](ff::DType d) { return nb::make_tuple(ff::dtype_name(d), ff::dtype_size(d)); });
  m.attr("FAILURE_KINDS") = table<ff::FailureKind>(ff::failure_kind_count, ff::failure_name);
}
