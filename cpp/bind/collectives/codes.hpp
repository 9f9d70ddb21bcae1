// Numbers from Python as enumerators. The tables of names, by number, are attributes of the module: Python has no others.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "fireflyer/collectives/group/operation.hpp"

template <class Enum>
Enum enum_from(int number, int first, int count, const char* what) {
  if (number < first || number >= count) throw std::invalid_argument(std::string(what) + " " + std::to_string(number) + " is not known");
  return static_cast<Enum>(number);
}

inline ff::OpKind kind_from(int number) { return enum_from<ff::OpKind>(number, 1, ff::op_kind_count, "operation kind"); }
inline ff::DType dtype_from(int number) { return enum_from<ff::DType>(number, 0, ff::dtype_count, "dtype"); }
inline ff::ReduceOp reduce_op_from(int number) { return enum_from<ff::ReduceOp>(number, 0, ff::reduce_op_count, "reduce op"); }

void bind_codes(nanobind::module_& m);
